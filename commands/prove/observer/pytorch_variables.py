"""Observe what the script keeps in variables from step to step: moving averages of tensors, and random generators."""

from __future__ import annotations

import ast
import functools
import math
import pickle
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from allstep.commands.prove.observer.loops import parsed
from allstep.commands.prove.observer.observer import Observer
from allstep.commands.prove.observer.pytorch_values import some_bytes
from allstep.commands.prove.observer.values import digest
from allstep.commands.prove.records import Kept

_FIRST_LOOKS = 6
_MAX_DEPTH = 3
_LOOPS = (ast.For, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Variables:
    """Variables of the script in one process: those of its functions that are being run, and of its objects there."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._num_looks = 0

    def look(self) -> None:
        """Record the variables after one of the first steps."""
        self._num_looks += 1
        if self._num_looks > _FIRST_LOOKS:
            return
        names, seen = averaged(self._observer.script), {}
        for frame in self._observer.frames():
            for variables in (frame.f_locals, frame.f_globals):
                self._collect(variables, seen, _MAX_DEPTH)
        kept = Kept({}, {})
        digest_of = self._observer.quiet("variables of the script", lambda values: digest(some_bytes(values)), "")
        for name, value in seen.values():
            if (state := _state_of(value)) is not None:
                kept.generators[name] = digest(np.frombuffer(state, np.uint8))
            elif name in names and _is_average(value):
                kept.averages[f"{name} (line {names[name]})"] = digest_of(value)
        if kept.averages or kept.generators:
            self._observer.write(kept)

    def _collect(self, variables: Mapping[str, Any], seen: dict[int, tuple[str, Any]], depth: int) -> None:
        """Collect variables with their names, and those of objects whose classes the script defines."""
        for name, value in list(variables.items()):
            if id(value) in seen or isinstance(value, type):
                continue
            seen[id(value)] = name, value
            inner = value.modules() if isinstance(value, torch.nn.Module) else (value,)
            for one in inner if depth else ():
                if type(one).__module__ == "__main__" and hasattr(one, "__dict__"):
                    self._collect(vars(one), seen, depth - 1)


def _is_average(value: Any) -> bool:
    is_free = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter) and not value.requires_grad
    return is_free and value.is_floating_point() and value.numel() > 1


def _state_of(value: Any) -> bytes | None:
    """Return the state of a random generator; None for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return pickle.dumps(value.bit_generator.state)
    read = getattr(value, "get_state" if isinstance(value, np.random.RandomState) else "getstate", None)
    return pickle.dumps(read()) if isinstance(value, (np.random.RandomState, random.Random)) and read else None


@functools.cache
def averaged(script: str) -> dict[str, int]:
    """Return the variables and attributes that a script updates as moving averages, with the lines of the updates.

    The weights of the old value and of the new one make up 1 in such an update. Nothing else gives a value to an
    attribute outside of `__init__`, or to a variable in the loops around the update.
    """
    found: dict[str, int] = {}
    tree = parsed(script)
    for statement in (node for node in ast.walk(tree) if isinstance(node, (ast.Assign, ast.Expr))):
        for target in _averages(statement):
            if not any(_gives(one, target) for one in _others(tree, statement, target)):
                found[target.rpartition(".")[2]] = statement.lineno
    return found


def _averages(statement: ast.stmt) -> Iterator[str]:
    """Yield the variable or attribute that a statement updates, with weights for the old value and the new one."""
    nodes = list(ast.walk(statement))
    numbers = [one.value for one in nodes if isinstance(one, ast.Constant) and isinstance(one.value, float)]
    has_rest = any(isinstance(one, ast.BinOp) and isinstance(one.op, ast.Sub) and _is_one(one.left) for one in nodes)
    has_weights = has_rest or any(math.isclose(one + other, 1) for one in numbers for other in numbers)
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and has_weights:
        name = _name(statement.targets[0])
        yield from [name] if name and _has(statement.value, name) else []
    methods = (one for one in nodes if isinstance(one, ast.Attribute) and isinstance(statement, ast.Expr))
    for method in methods:
        if method.attr == "lerp_" or (method.attr == "mul_" and has_weights):
            yield from filter(None, [_name(method.value)])


def _is_one(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 1


def _name(node: ast.expr) -> str:
    """Return the text of a variable or attribute without `.data`; empty for anything else."""
    if isinstance(node, ast.Attribute) and node.attr == "data":
        node = node.value
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


def _has(node: ast.AST, name: str) -> bool:
    return any(isinstance(one, (ast.Name, ast.Attribute)) and _name(one) == name for one in ast.walk(node))


def _others(tree: ast.Module, statement: ast.stmt, target: str) -> Iterator[ast.AST]:
    """Yield the statements in which a new value for a target would make it no average, or the one outside of loops."""
    own = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]
    scopes: Sequence[ast.AST] = [node for node in own if node.name != "__init__"]
    if "." not in target:
        scope = next((node for node in reversed(own) if _contains(node, statement)), tree)
        shared = (node for node in ast.walk(scope) if isinstance(node, (ast.Global, ast.Nonlocal)))
        loops = [node for node in ast.walk(scope) if isinstance(node, _LOOPS) and _contains(node, statement)]
        scopes = [scope] if any(target in node.names for node in shared) else loops[:1]
        if not scopes:
            yield ast.For(ast.Name(target), ast.Name(target), [], [])
    for scope in scopes:
        yield from (node for node in ast.walk(scope) if node is not statement)


def _contains(node: Any, inner: ast.stmt) -> bool:
    return node.lineno <= inner.lineno <= (node.end_lineno or 0)


def _gives(node: ast.AST, name: str) -> bool:
    """Return whether a node gives a variable or attribute a value that does not depend on the old one."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.For) else []
    is_bound = any(_has(one, name) for target in targets for one in _plain(target))
    return is_bound and not (isinstance(node, ast.Assign) and node.value and _has(node.value, name))


def _plain(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, (ast.Tuple, ast.List)):
        for one in target.elts:
            yield from _plain(one)
    elif isinstance(target, (ast.Name, ast.Attribute)):
        yield target
