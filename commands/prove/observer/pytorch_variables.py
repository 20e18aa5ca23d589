"""Observe what the script keeps in variables from step to step: moving averages of tensors, and random generators."""

import ast
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from allstep.commands.prove.observer.observer import Observer
from allstep.commands.prove.observer.progress import parsed
from allstep.commands.prove.observer.pytorch_values import some_bytes
from allstep.commands.prove.observer.values import digest
from allstep.commands.prove.records import Kept
from allstep.common.base.random_state import state_of

_FIRST_STEPS = 6
_MAX_DEPTH = 3


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
    has_weights = has_weights or any(math.isclose(sum(pair), 1) for pair in itertools.combinations(numbers, 2))
    if isinstance(statement, ast.Assign):
        name = ast.unparse(statement.targets[0])
        yield from [name] if has_weights and name in map(ast.unparse, ast.walk(statement.value)) else []
        return
    for one in nodes:
        if isinstance(one, ast.Attribute) and (one.attr == "lerp_" or (one.attr == "mul_" and has_weights)):
            yield ast.unparse(one.value).removesuffix(".data")
