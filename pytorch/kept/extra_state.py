"""Values that modules return from `get_extra_state`, as bytes in a tensor. Nothing is pickled, and types stay."""

import base64
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from allstep.common.base.errors import UserError
from allstep.common.files import strict_json


class Unknown(Exception):
    """Error for a value of a type that cannot be kept; the message is the type's name."""


def encode(value: Any) -> torch.Tensor:
    """Return a value as bytes (uint8). Raises Unknown if it holds a value of a type that `decode` does not return."""
    return torch.frombuffer(bytearray(json.dumps(_plain(value)).encode()), dtype=torch.uint8)


def check(value: Any) -> None:
    """Raise Unknown if `decode` cannot return a value."""
    try:
        strict_json.loads(encode(value).numpy().tobytes())
    except strict_json.NotJson:
        raise Unknown(f"{type(value).__name__} that is nested too deeply") from None


def decode(tensor: torch.Tensor) -> Any:
    """Return the value that `encode` took. Raises UserError if the bytes are damaged."""
    try:
        return _restored(strict_json.loads(tensor.numpy(force=True).tobytes()))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"the extra state in the checkpoint is damaged: {error}; take another checkpoint") from None


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is an array of numbers: neither sparse, nested nor quantised."""
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: lists and what JSON lacks as an object whose only key says what it is."""
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is float:
        return {"float": str(value)}
    if kind in (list, tuple):
        return {kind.__name__: [_plain(item) for item in value]}
    if kind is dict:
        return {"dict": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor) and is_dense(value):
        numbers = value.detach().cpu().contiguous()
        content = numbers.reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), _plain(content)["bytes"]]}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        name = "array" if isinstance(value, np.ndarray) else "number"
        return {name: [value.dtype.str, list(value.shape), _plain(value.tobytes())["bytes"]]}
    raise Unknown(kind.__name__)


def _restored(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    return _KINDS[kind](content)


def _tensor(content: Any) -> torch.Tensor:
    name, shape, text = content
    dtype = _TYPES[name]
    numbers = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8) if text else torch.empty(0)
    return numbers.view(dtype).reshape(shape) if text else torch.empty(shape, dtype=dtype)


_TYPES = {str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)}


def _array(content: Any) -> np.ndarray:
    name, shape, text = content
    dtype = np.dtype(name)
    if dtype.kind not in "biufc":
        raise ValueError(f"{name} is no type of numbers")
    return np.frombuffer(base64.b64decode(text), dtype).reshape(shape).copy()


_KINDS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "list": lambda items: [_restored(item) for item in items],
    "tuple": lambda items: tuple(_restored(item) for item in items),
    "dict": lambda items: {_restored(key): _restored(item) for key, item in items},
    "bytes": base64.b64decode,
    "tensor": _tensor,
    "array": _array,
    "number": lambda content: _array(content)[()],
}
