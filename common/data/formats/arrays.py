"""Conversion of user arrays into splits: supported types only, and every number is checked.

Images have channels last in allstep, NumPy and Keras, channels first in PyTorch's tensors and data sets. The kind of
the source decides, once; a shape that looks like the other layout is refused.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from allstep.common.base.errors import UserError, summary
from allstep.common.data.datasets.base import ArraySplit

_NUMBERS_AT_ONCE = 2**22


def array_split(inputs: Any, targets: Any, where: str) -> ArraySplit:
    """Return a split of two array-likes whose first axis is the sample.

    `where` is the name of the arrays in error messages. Raises UserError if there are no samples, inputs and targets
    differ in number, and as `inputs_of` and `targets_of` do.
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

    Integers (samples, height, width, ...) are pixels, and become uint8. uint8 (samples, height, width) are grey images,
    and get an axis for their one channel. `indices` are sample indices for error messages; 0, 1, ... if not given.
    Raises UserError if the samples differ in shape or are not numbers, or a value is NaN, infinite or out of range.
    """
    array = _array(values, where)
    if len(array) and not array.size:
        raise UserError(f"expected numbers in each sample of {where}, received none: shape {array.shape}; correct it")
    if array.dtype.kind in "iu" and array.ndim > 2:
        array = _pixels(array, where)
    if array.dtype == np.uint8:
        return array[..., None] if array.ndim == 3 else array
    return array.astype(np.int64, copy=False) if array.dtype.kind in "iu" else _finite(array, where, indices)


def targets_of(values: Any, where: str, indices: np.ndarray | None = None) -> np.ndarray:
    """Convert targets: integers to int64 (samples,) or (samples, length), floats to float32 (samples, numbers).

    Text, such as names of classes, becomes str (samples,) or (samples, length). Raises UserError if the samples differ
    in shape or are neither numbers nor text, or a value is NaN or infinite.
    """
    array = _array(values, where, text=True)
    if array.dtype.kind == "f":
        return _finite(array.reshape(len(array), -1) if len(array) else array, where, indices)
    if array.ndim > 1:  # (samples, 1) and the like
        array = array.reshape(len(array), *(length for length in array.shape[1:] if length != 1))
    return array if array.dtype.kind == "U" else array.astype(np.int64, copy=False)


def joined(fields: Sequence[Any], where: str) -> np.ndarray:
    """Return fields (samples, ...) as float32 (samples, numbers). Raises UserError if a field is not numeric."""
    try:
        arrays = [np.asarray(field, np.float32) for field in fields]
        return np.concatenate([array.reshape(len(array), math.prod(array.shape[1:])) for array in arrays], 1)
    except ValueError as error:
        raise UserError(
            f"expected numbers in each of several --input-fields of {where}, received something else: "
            f"{summary(error)}; name one, or others"
        ) from error


def _array(values: Any, where: str, *, text: bool = False) -> np.ndarray:
    """Return array-likes as an array of numbers, or of str if `text`."""
    if np.ma.is_masked(values):
        raise UserError(f"expected a value for each sample of {where}, received a masked array; fill or drop the rest")
    try:
        array = np.asarray(values)
        if array.dtype == object:
            array = _unboxed(array)
        if array.dtype.kind == "S":
            array = np.char.decode(array, "utf-8")
        if array.dtype.kind == "V" and np.can_cast(array.dtype, np.float32):  # of ml_dtypes: bfloat16, int4, ...
            array = array.astype(np.int8 if np.can_cast(array.dtype, np.int8) else np.float32)
    except ValueError:  # a list of arrays whose shapes differ, or bytes that are no text
        array = np.empty(0, object)
    if array.dtype.kind == "T":  # NumPy's strings of any length
        array = np.asarray(array.tolist(), str)
    if array.dtype.kind not in ("biufU" if text else "biuf") or array.ndim == 0:
        received, advice = f"{array.dtype} of shape {array.shape}", "convert it to real numbers"
        if array.dtype == object and array.ndim == 0:  # NumPy takes it for a single value
            received, advice = type(values).__name__, "convert it to an array of NumPy"
        elif array.dtype == object:
            received, advice = "shapes or types that differ", "give every sample the same shape and type"
        raise UserError(
            f"expected {where} to be numbers{' or names' if text else ''}, of one shape for all samples, received "
            f"{received}; {advice}"
        )
    return array


def _unboxed(array: np.ndarray) -> np.ndarray:
    """Return an array of objects as an array of their common type; unchanged if they differ in type or shape."""
    are_text = {isinstance(item, (str, bytes)) for item in array.ravel()}
    return array if len(are_text) > 1 else np.asarray(array.tolist())


def _pixels(array: np.ndarray, where: str) -> np.ndarray:
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    if low < 0 or high > 255:
        raise UserError(
            f"expected pixels from 0 to 255 in {where}, received {array.dtype} from {low} to {high}; convert them to "
            "uint8, or to fractions (floating-point numbers)"
        )
    return array.astype(np.uint8, copy=False)


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


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor of PyTorch, which this package does not import."""
    return hasattr(value, "detach")


def plain(value: object) -> object:
    """Return a tensor as an array in memory of the CPU, without its gradient; any other value as it is.

    Raises UserError for a sparse or quantized tensor, and for one without numbers of its own (meta, nested).
    """
    if not is_tensor(value):
        return value
    tensor: Any = value
    if "strided" not in str(tensor.layout) or tensor.is_quantized:
        kind, method = ("quantized", "dequantize") if tensor.is_quantized else ("sparse", "to_dense")
        raise UserError(f"expected plain tensors as samples, received a {kind} one; convert it by .{method}()")
    try:
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
        return tensor.float().numpy() if "float" in str(tensor.dtype) else tensor.numpy()
    except (NotImplementedError, RuntimeError) as error:
        raise UserError(
            f"expected plain tensors as samples, received one that is no array: {summary(error)}"
        ) from error


def channels_last(images: np.ndarray, where: str) -> np.ndarray:
    """Return images (..., channels, height, width) as (..., height, width, channels).

    Raises UserError if the shape looks like channels last.
    """
    height, width, channels = images.shape[-3:]
    if _looks_like(channels, height, width):
        raise UserError(
            f"{where} have the shape {images.shape[-3:]}, which looks like channels last; tensors and data sets of "
            f"PyTorch have channels first: permute them to {(channels, height, width)}, or give NumPy arrays"
        )
    return np.moveaxis(images, -3, -1)


def check_channels_last(shape: tuple[int, ...], where: str) -> None:
    """Refuse a sample's shape that looks like channels first."""
    if len(shape) == 3 and _looks_like(*shape):
        channels, height, width = shape
        raise UserError(
            f"{where} have the shape {shape}, which looks like channels first; arrays have channels last: transpose "
            f"them to {(height, width, channels)}, or give a Session tensors of PyTorch"
        )


def _looks_like(channels: int, height: int, width: int) -> bool:
    """Return whether the sides are those of colour images, or of square grey ones, in this order."""
    return min(height, width) > 4 and (channels in (3, 4) or (channels == 1 and height == width))
