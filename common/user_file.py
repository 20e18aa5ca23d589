"""Functions in a file of the user's own, as `--dataset FILE.py:load` names them: imported by every rank, once.

Such a file is code, and does what it likes. So only a flag names one, never a checkpoint or a folder of data, and a
line of rank 0 says that it is imported.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from allstep.common.launch.placement import apparent_rank
from allstep.common.process.errors import UserError, shown, summary
from allstep.common.process.terminal import print_line

PROGRAM = "program"
"""The name of a model or a data set that a program hands over (`common.program`), and no flag can."""


def import_function(path: Path, name: str, flag: str) -> Callable[..., Any]:
    """The function of that name in a file.

    Args:
        flag: that names them, for messages.

    Raises:
        UserError: the file cannot be imported, or has no such function.
    """
    function = find(path, name, flag)
    if not callable(function):
        raise UserError(f"expected a function {name} in {path} for {flag}, received none; define it, or name another")
    return function


def import_for(framework: str, path: Path, name: str, flag: str) -> Callable[..., Any]:
    """NAME_framework, where the file has it, or else NAME: a file may have a function for each framework.

    Raises:
        UserError: see `import_function`.
    """
    return find(path, f"{name}_{framework}", flag) or import_function(path, name, flag)


def find(path: Path, name: str, flag: str) -> Any:
    """What a file has by that name, or None.

    Raises:
        UserError: the file cannot be imported.
    """
    if not path.is_file():
        raise UserError(f"expected a Python file at {shown(path)} for {flag}, received none; name one")
    path = path.resolve()
    if path not in _modules:
        _modules[path] = _imported(path, flag)
    return getattr(_modules[path], name, None)


def call(function: Callable[..., Any], *arguments: object, flag: str) -> Any:
    """What the user's function returns.

    Raises:
        UserError: it raises something else; the message names the line.
    """
    try:
        return function(*arguments)
    except UserError:
        raise
    except Exception as error:
        raise _failed(error, f"{function.__name__}() to return", flag) from error


_modules: dict[Path, ModuleType] = {}


def _imported(path: Path, flag: str) -> ModuleType:
    if apparent_rank() == 0:
        print_line(f"allstep: {flag} imports {path}", sys.stderr)
    name = f"allstep_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader  # it is a file whose name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and pickle look for it
    sys.path.append(str(path.parent))  # for the files beside it; last, so that it shadows nothing
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _failed(error, f"{path} to be imported", flag) from error
    return module


def _failed(error: Exception, what: str, flag: str) -> UserError:
    frames = traceback.extract_tb(error.__traceback__)
    *_, frame = [frame for frame in frames if "site-packages" not in frame.filename]  # not the library's that it calls
    if isinstance(error, SyntaxError):
        where = f"line {error.lineno} of {error.filename}"
    else:
        where = f"line {frame.lineno} of {frame.filename}"
    return UserError(f"expected {what} for {flag}, received {shown(summary(error))} in {where}; mend it")


def check(word: str, flag: str) -> None:
    """Refuse a file that is not there, before anything is spent.

    Raises:
        UserError: names it.
    """
    if (file := parse(word)) and not file[0].is_file():
        raise UserError(f"expected a Python file in {flag}, received {shown(word)}, which is not there; name another")


def parse(word: str) -> tuple[Path, str] | None:
    """File and function of FILE.py:FUNCTION; None where a word is not of that form."""
    file, _, function = word.rpartition(":")
    return (Path(file), function) if file.endswith(".py") and function.isidentifier() else None
