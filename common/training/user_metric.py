"""A metric of a user's file, and its trial before training: counts of parts have to add up to those of the whole.

Means of batches, maxima, and counts that the object keeps to itself do not: their value would depend on how the samples
are cut into batches and shared by ranks.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from allstep.common.base.errors import UserError, warn
from allstep.common.base.random_state import seeded
from allstep.common.catalog import user_file
from allstep.common.launch.placement import apparent_rank

if TYPE_CHECKING:
    from allstep.common.data.datasets import Dataset
    from allstep.common.training.counted import Counts

_call = functools.partial(user_file.call_often, flag="--metrics")
_MAX_SAMPLES, _MAX_DRAWN = 32, 2**24
"""Samples of the trial, and numbers in their outputs."""


class UserMetric:
    """An object of a user, with update(outputs, targets) and compute(counts)."""

    def __init__(self, name: str, file: tuple[Any, str]) -> None:
        """Find the object, or call the class without arguments. Raises UserError if there is none with both methods."""
        found = user_file.find(*file, "--metrics")
        if isinstance(found, type):
            found = user_file.call(found, flag="--metrics")
        if not all(callable(getattr(found, method, None)) for method in ("update", "compute")):
            received = "nothing" if found is None else type(found).__name__
            raise UserError(f"--metrics {name} needs update(outputs, targets) and compute(counts), received {received}")
        self._name, self._found, self._has_names = name, found, True
        self.lower_is_better = bool(getattr(found, "lower_is_better", False))

    def update(self, outputs: np.ndarray, targets: np.ndarray) -> Mapping[str, Any]:
        """Return the counts of some samples by name; copies are given, which the object may change."""
        counts = _call(self._found.update, outputs.copy(), targets.copy())
        self._has_names = isinstance(counts, Mapping)
        return counts if self._has_names else {"": counts}

    def compute(self, counts: Counts) -> Any:
        """Return the value for the counts of all samples."""
        return user_file.call(self._found.compute, counts if self._has_names else counts[""], flag="--metrics")

    def check(self, dataset: Dataset) -> None:
        """Compare counts of validation samples, and outputs drawn at random, with the sum of those of two parts.

        Raises UserError if they differ, or if compute() returns something else after other calls of update(). An
        exception for such outputs says nothing about those of a network: it is told, and left to the validation.
        """
        num_samples = min(_MAX_SAMPLES, len(dataset.validation), _MAX_DRAWN // math.prod(dataset.output_shape))
        if num_samples < 2:
            return
        with seeded():
            _, targets = dataset.validation.read(np.arange(num_samples), epoch=0)
            outputs = np.random.default_rng(0).standard_normal((num_samples, *dataset.output_shape), np.float32)
            self._try(outputs, targets)

    def _try(self, outputs: np.ndarray, targets: np.ndarray) -> None:
        half = len(targets) // 2
        try:
            fresh, used = (_call(copy.deepcopy, self._found) for _ in range(2))
            whole, again, first, last = (
                _call(_as_arrays, _call(used.update, outputs[part].copy(), targets[part].copy()))
                for part in (slice(None), slice(None), slice(half), slice(half, None))
            )
        except UserError as error:
            self._tell_untried(error)
            return
        if not _are_close(whole, again):  # it draws random numbers
            return
        if not (_are_alike(whole, first) and _are_alike(whole, last)) or not _are_close(
            whole, {name: first[name] + last[name] for name in first}
        ):
            raise UserError(
                f"expected counts or sums that add up, of the same names each time, from update() of --metrics "
                f"{self._name}, received others for {len(targets)} samples than for two parts of them together; return "
                "a sum and a number in place of a mean, and divide in compute()"
            )
        given = whole.get("", whole)
        try:
            value = _call(used.compute, given)
        except UserError as error:
            self._tell_untried(error)
            return
        if as_number(value) is not None and not _returns(fresh, given, as_number(value)):
            raise UserError(
                f"expected compute() of --metrics {self._name} to use nothing but the counts it is given, received "
                "another value for the same counts after other calls of update(); return from update() what it needs"
            )

    def _tell_untried(self, error: UserError) -> None:
        if apparent_rank() == 0:
            warn(f"--metrics {self._name} is not tried on the parts of a batch: {str(error).partition(';')[0]}")


def _as_arrays(counts: Any) -> dict[str, np.ndarray]:
    named = counts if isinstance(counts, Mapping) else {"": counts}
    return {name: np.asarray(value, np.float64) for name, value in named.items()}


def _are_alike(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(one[name].shape == other[name].shape for name in one)


def _are_close(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    return _are_alike(one, other) and all(
        np.allclose(one[name], other[name], rtol=1e-3, equal_nan=True) for name in one
    )


def _returns(metric: Any, counts: Any, value: Any) -> bool:
    """Return whether compute() returns a value; it may also raise an exception, for want of earlier calls."""
    try:
        return as_number(_call(metric.compute, counts)) == value
    except UserError:
        return False


def as_number(value: Any) -> Any:
    """Return a metric's value as JSON has it: a number, None if it is not finite, or a list of these."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [as_number(item) for item in value]
    if isinstance(value, (bool, np.bool_, int, np.integer)):
        return int(value)
    if not isinstance(value, (float, np.floating)):
        raise UserError(f"compute() of a metric returns {type(value).__name__}; return a number or a list of numbers")
    return float(value) if math.isfinite(value) else None
