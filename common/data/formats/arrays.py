"""Conversion of user arrays into splits: supported types only, and every number is checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.data.datasets.base import ArraySplit

_NUMBERS_AT_ONCE = 2**22


def array_split(inputs: Any, targets: Any, where: str) -> ArraySplit:
    """Return a split of two array-likes whose first axis is the sample.

    Args:
        where: name of the arrays in error messages.

    Raises:
        UserError: there are no samples, inputs and targets differ in number, or see `inputs_of` and `targets_of`.
    """
    inputs, targets = inputs_of(inputs, f"the inputs of {where}"), targets_of(targets, f"the targets of {where}")
    if len(inputs) != len(targets):
        raise UserError(
            f"expected a target for each input of {where}, received {len(inputs)} inputs and {len(targets)} targets; "
            "correct that"
        )
    if not len(inputs):
        raise UserError(f"expected at least 1 sample in {where}, received none; add samples")
    return ArraySplit(inputs, targets)


def inputs_of(values: Any, where: str, indices: np.ndarray | None = None) -> np.ndarray:
    """Convert inputs (samples, ...): uint8 stays, floats and booleans become float32, other integers (tokens) int64.

    uint8 (samples, height, width) are grey images, and get an axis for their one channel.

    Args:
        indices: sample indices for error messages; 0, 1, ... if not given.

    Raises:
        UserError: the samples differ in shape or are not numbers, or a value is NaN or infinite.
    """
    array = _array(values, where)
    if array.dtype == np.uint8:
        return array[..., None] if array.ndim == 3 else array
    return array.astype(np.int64, copy=False) if array.dtype.kind in "iu" else _finite(array, where, indices)


def targets_of(values: Any, where: str, indices: np.ndarray | None = None) -> np.ndarray:
    """Convert targets: integers to int64 (samples,) or (samples, length), floats to float32 (samples, numbers).

    Raises:
        UserError: the samples differ in shape or are not numbers, or a value is NaN or infinite.
    """
    array = _array(values, where)
    if array.dtype.kind in "iub":
        if array.ndim == 2 and array.shape[1] == 1:
            array = array[:, 0]
        return array.astype(np.int64, copy=False)
    return _finite(array.reshape(len(array), -1) if len(array) else array, where, indices)


def _array(values: Any, where: str) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError:  # a list of arrays whose shapes differ
        array = np.empty(0, object)
    if array.dtype.kind not in "biuf" or array.ndim == 0:
        received = "shapes that differ" if array.dtype == object else f"{array.dtype} of shape {array.shape}"
        raise UserError(
            f"expected {where} to be numbers, of one shape for all samples, received {received}; give every sample the "
            "same shape"
        )
    return array


def _finite(array: np.ndarray, where: str, indices: np.ndarray | None) -> np.ndarray:
    """Return the array as float32. Raises UserError if any value is NaN or infinite."""
    array = array.astype(np.float32, copy=False)
    at_once = max(1, _NUMBERS_AT_ONCE // max(1, array[:1].size))
    for begin in range(0, len(array), at_once):
        finite = np.isfinite(array[begin : begin + at_once])
        if not finite.all():
            sample, *rest = np.unravel_index(int(finite.argmin()), finite.shape)
            number = begin + int(sample)
            raise UserError(
                f"expected {where} to be finite numbers, received {array[(number, *rest)]} in sample "
                f"{number if indices is None else indices[number]}; replace it"
            )
    return array
