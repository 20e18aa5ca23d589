"""State that the code of a user's network keeps outside of it: globals, class attributes, closures, default arguments.

The search starts at the names in the methods of the network's classes, and follows them to other code of the user.
"""

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from allstep.common.catalog.user_modules import is_installed

_NOT_USERS = sys.stdlib_module_names | {"torch", "allstep"}
"""Packages that are not the user's wherever they lie, such as a PyTorch built from source."""


def outside_state(network: nn.Module) -> Iterator[tuple[str, Any, Callable[[Any], None]]]:
    """Yield the name and value of each variable that a network's code refers to, and a function that sets it."""
    found, seen, names = list[Any](), set[int](), Counter[str]()
    for module in network.modules():
        found += (type(module), *filter(callable, vars(module).values()))
        found += (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    while found:
        one = found.pop()
        if not isinstance(one, type) and inspect.isroutine(one):
            one = inspect.unwrap(getattr(one, "__func__", one))
        if id(one) in seen or not isinstance(one, (type, FunctionType)) or not _is_users(one.__module__):
            continue
        seen.add(id(one))
        for name, value, assign in _variables(one):
            if isinstance(value, property):
                found += (value.fget, value.fset)
            elif isinstance(value, type) or inspect.isroutine(value):
                found.append(value)
            elif not isinstance(value, (ModuleType, nn.Module)):
                names[name] += 1  # closures made by one function have equal names
                yield name if names[name] == 1 else f"{name} ({names[name]})", value, assign


def _variables(one: type | FunctionType) -> Iterator[tuple[str, Any, Callable[[Any], None]]]:
    if isinstance(one, type):
        for base in one.__mro__[:-1]:
            if _is_users(base.__module__):
                for name, value in tuple(vars(base).items()):
                    if not name.startswith("__") or inspect.isroutine(value):
                        yield f"{base.__qualname__}.{name}", value, _setter(base, name)
        return
    for name, cell in zip(one.__code__.co_freevars, one.__closure__ or (), strict=True):
        if cell != CellType():
            yield f"closure.{name}", cell.cell_contents, _setter(cell, "cell_contents")
    for value in (*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()):
        yield f"{one.__qualname__}.default", value, lambda _: None
    names = set(_names(one.__code__))
    modules = [value for name in names if isinstance(value := one.__globals__.get(name), ModuleType)]
    for space in (one.__globals__, *(vars(module) for module in modules if _is_users(module.__name__))):
        for name in sorted(names & space.keys()):
            yield f"global.{name}", space[name], lambda value, space=space, name=name: space.update({name: value})


def _setter(holder: Any, name: str) -> Callable[[Any], None]:
    return lambda value: setattr(holder, name, value)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _is_users(module: str | None) -> bool:
    """Return whether a module is neither installed nor of Python, PyTorch or this suite."""
    name = (module or "").partition(".")[0]
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return name not in _NOT_USERS and not is_installed(file)
