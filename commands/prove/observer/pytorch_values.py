"""Values of PyTorch's tensors of any kind, as arrays."""

import math
from typing import Any

import numpy as np
import torch
from torch._C import _DisableFuncTorch, _functorch  # pyright: ignore[reportAttributeAccessIssue]

from allstep.commands.prove.observer.values import projections, stride
from allstep.commands.prove.records import Projections


class UnobservableError(Exception):
    """A tensor has no values that can be compared between ranks."""


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the bytes of a tensor of any type as a uint8 array (samples, bytes).

    Raises UnobservableError if the tensor has no values, or is a shard.
    """
    with torch.no_grad(), _DisableFuncTorch():
        values = dense(tensor).detach().to("cpu").contiguous()
        num_rows = len(values) if values.dim() else 1
        if not values.numel():
            return np.zeros((num_rows, 0), np.uint8)
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj()).contiguous()
        return values.reshape(num_rows, -1).view(torch.uint8).numpy()


def as_rows(value: Any) -> np.ndarray | None:
    """Return the samples of a tensor, or of a rank's share of it, as rows; None for anything else, and for a number."""
    if isinstance(value, torch.Tensor):
        return bytes_of(getattr(value, "_local_tensor", value)) if value.dim() else None
    return value if isinstance(value, np.ndarray) and value.ndim else None


def some_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return the bytes of at most as many values of a tensor as are projected."""
    return bytes_of(_inspected(tensor))


def some_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor that are projected, in a copy on the CPU."""
    return _inspected(tensor).to("cpu", torch.float32, copy=True)


def projected(tensor: torch.Tensor) -> Projections | None:
    """Return the projections of a tensor; None if not all are finite."""
    return projections(_inspected(tensor).float().to("cpu").numpy())


def _inspected(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), _DisableFuncTorch():
        values = dense(tensor).detach().reshape(-1)
        return values[:: stride(len(values))]


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of any kind as a dense one.

    Raises UnobservableError if the tensor has no values, or is a shard.
    """
    while _functorch.is_functorch_wrapped_tensor(tensor):  # in torch.func
        tensor = _functorch.get_unwrapped(tensor)
    if tensor.is_meta:
        raise UnobservableError("tensors on the meta device have no values")
    if hasattr(tensor, "placements"):
        if is_shard(tensor):
            raise UnobservableError("each rank has a shard")
        return getattr(tensor, "_local_tensor")  # noqa: B009 (of DTensor)
    if tensor.is_nested:
        return torch.cat([part.reshape(-1) for part in tensor.unbind()])
    if tensor.is_quantized:
        return tensor.int_repr()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def is_shard(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a rank's shard of a DTensor, or one of FSDP."""
    placements = getattr(tensor, "placements", ())
    return any(not placement.is_replicate() for placement in placements) or getattr(tensor, "_is_flat_param", False)


def is_zero(tensor: torch.Tensor) -> bool:
    """Return whether all inspected values of a tensor are zero."""
    values = projected(tensor)
    return values is not None and math.fsum(map(abs, values)) == 0
