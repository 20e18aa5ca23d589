"""Values of PyTorch's tensors of any kind, as arrays; what the script keeps in variables: averages and generators."""

import ast
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch._C import _DisableFuncTorch, _functorch  # pyright: ignore[reportAttributeAccessIssue]

from allstep.commands.prove.observer.observer import Observer
from allstep.commands.prove.observer.progress import parsed
from allstep.commands.prove.observer.values import digest, projections, stride
from allstep.commands.prove.records import Kept, Projections
from allstep.common.base.random_state import state_of

_FIRST_STEPS = 6
_MAX_DEPTH = 3


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


def note_variables(observer: Observer) -> None:
    """Record variables after one of the first steps: those of functions that are being run, and of objects in them."""
    if observer.progress.num_steps >= _FIRST_STEPS:
        return
    names, seen, kept = averaged(observer.script), {}, Kept({}, {})
    for frame in observer.frames():
        for variables in (frame.f_locals, frame.f_globals):
            _collect(variables, seen, _MAX_DEPTH)
    for name, value in seen.values():
        if (state := state_of(value)) is not None:
            kept.generators[name] = digest(np.frombuffer(state.encode(), np.uint8))
        elif name in names and isinstance(value, torch.Tensor) and value.numel() > 1 and not value.requires_grad:
            kept.averages[f"{name} (line {names[name]})"] = digest(some_bytes(value))
    if kept.averages or kept.generators:
        observer.write(kept)


def _collect(variables: Mapping[str, Any], seen: dict[int, tuple[str, Any]], depth: int) -> None:
    """Collect variables with their names, and those of objects whose classes the script defines."""
    for name, value in list(variables.items()):
        if id(value) in seen or isinstance(value, (type, torch.nn.Parameter)):
            continue
        seen[id(value)] = name, value
        for one in value.modules() if isinstance(value, torch.nn.Module) else (value,):
            if depth and type(one).__module__ in ("__main__", "__mp_main__") and hasattr(one, "__dict__"):
                _collect(vars(one), seen, depth - 1)


@functools.cache
def averaged(script: str) -> dict[str, int]:
    """Return the variables and attributes that a script updates as moving averages, with the lines of the updates.

    No loop gives them other values, such as batches.
    """
    tree = parsed(script)
    statements = (node for node in ast.walk(tree) if isinstance(node, (ast.Assign, ast.Expr)))
    found = {name: statement.lineno for statement in statements for name in _averages(statement)}
    loops = [node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.While))]
    stored = (one for loop in loops for one in ast.walk(loop) if isinstance(getattr(one, "ctx", None), ast.Store))
    others = {ast.unparse(one) for one in stored if getattr(one, "lineno", 0) != found.get(ast.unparse(one))}
    return {name.rpartition(".")[2]: line for name, line in found.items() if name not in others}


def _averages(statement: ast.Assign | ast.Expr) -> Iterator[str]:
    """Yield what a statement updates with weights for the old value and the new one, which make up 1."""
    nodes = list(ast.walk(statement))
    numbers = [one.value for one in nodes if isinstance(one, ast.Constant) and isinstance(one.value, float)]
    rests = (one.left for one in nodes if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Sub))
    has_weights = any(getattr(one, "value", None) == 1 for one in rests)
    has_weights = has_weights or any(math.isclose(one + other, 1) for one in numbers for other in numbers)
    if isinstance(statement, ast.Assign):
        name = ast.unparse(statement.targets[0])
        yield from [name] if has_weights and name in map(ast.unparse, ast.walk(statement.value)) else []
        return
    for one in nodes:
        if isinstance(one, ast.Attribute) and (one.attr == "lerp_" or (one.attr == "mul_" and has_weights)):
            yield ast.unparse(one.value).removesuffix(".data")
