"""The mark `launch`, which each test has that starts a process: `make test-quick` leaves those out.

It is found in the code of a test, of its fixtures and of the helpers in tests/ that they name. A test that starts a
process through other code has the mark written to it, or fails with a line that says so.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

_TESTS = Path(__file__).resolve().parent
_EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"}
_HARMLESS = {"uname", "git", "ldconfig", "/sbin/ldconfig", "gcc", "cc", "ld", "file"}
"""Programs by which the standard library and others look at this machine, in milliseconds."""
_STARTERS = {"allstep.commands.shared.process_tree", "allstep.commands.shared.jobs", "allstep.commands.soak.training",
             "allstep.common.launch.spawn", "multiprocessing", "subprocess"}  # fmt: skip
"""Modules whose functions start processes."""
_current: dict[str, Any] = {"item": None}


def mark(items: list[pytest.Item]) -> None:
    """Give the mark to all tests that start processes."""
    known: dict[Any, bool] = {}
    for item in items:
        if isinstance(item, pytest.Function):
            fixtures = [one.func for found in item._fixtureinfo.name2fixturedefs.values() for one in found]
            if any(_starts_processes(function, known) for function in (item.function, *fixtures)):
                item.add_marker(pytest.mark.launch)


def _starts_processes(function: Callable, known: dict[Any, bool]) -> bool:
    function = getattr(function, "__wrapped__", function)
    if not isinstance(function, FunctionType):
        return False
    if function not in known:
        known[function] = False  # for functions that call each other
        known[function] = any(_starts(value, known) for value in _named(function))
    return known[function]


def _starts(value: Any, known: dict[Any, bool]) -> bool:
    if isinstance(value, ModuleType):
        return value.__name__ in _STARTERS
    if getattr(value, "__module__", None) in _STARTERS:
        return True
    code = getattr(getattr(value, "__wrapped__", value), "__code__", None)
    if code and Path(code.co_filename).is_relative_to(_TESTS):
        return _starts_processes(value, known)
    if isinstance(value, type) and value.__module__ in sys.modules:
        file = getattr(sys.modules[value.__module__], "__file__", None) or ""
        if Path(file).is_relative_to(_TESTS):
            return any(_starts_processes(method, known) for method in vars(value).values() if callable(method))
    return False


def _named(function: FunctionType) -> Iterator[Any]:
    """Yield the objects that a function names: globals, attributes of modules, and what it holds from outside."""
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    values = [function.__globals__[name] for name in names if name in function.__globals__]
    for code in _codes(function.__code__):
        for name in code.co_names:  # imported in the function itself
            if name in _STARTERS:
                values.append(importlib.import_module(name))
    for cell in function.__closure__ or ():
        values.append(cell.cell_contents)
    yield from values
    for value in values:
        if isinstance(value, ModuleType) and Path(getattr(value, "__file__", None) or "/").is_relative_to(_TESTS):
            yield from (getattr(value, name) for name in names if hasattr(value, name))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def guard() -> None:
    """Have tests without the mark fail where they start a process."""
    process = os.getpid()

    def check(event: str, arguments: tuple) -> None:
        item = _current["item"]
        if event not in _EVENTS or item is None or os.getpid() != process or item.get_closest_marker("launch"):
            return
        program = str(
            arguments[1][0] if event == "subprocess.Popen" and arguments[1] else arguments[0] if arguments else event
        )
        if program not in _HARMLESS:
            _current["item"] = None
            pytest.fail(f"{item.nodeid} starts {program}; mark it with @pytest.mark.launch", pytrace=False)

    sys.addaudithook(check)


def watch(item: pytest.Item | None) -> None:
    """Note the test that runs."""
    _current["item"] = item
