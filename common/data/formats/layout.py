"""Layout of images: channels last in allstep, NumPy and Keras, channels first in PyTorch's tensors and data sets.

The kind of the source decides, once; a shape that looks like the other layout is refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from allstep.common.base.errors import UserError, summary


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
