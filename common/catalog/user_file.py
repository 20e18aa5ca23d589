"""Functions in a file of the user, such as `--dataset FILE.py:load`, which every rank imports once.

Such a file is arbitrary code. So only a flag can name one, never a checkpoint or a folder of data, and rank 0 prints a
line when it is imported.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from allstep.common.base.errors import UserError, quote, summary
from allstep.common.base.terminal import print_line
from allstep.common.launch.placement import apparent_rank

PROGRAM = "program"
"""Name of a model or a data set that a program passes as an object (see `common.api.session`), which no flag can."""


def import_function(path: Path, name: str, flag: str) -> Callable[..., Any]:
    """Return the function of that name in a file.

    Args:
        flag: the flag that names file and function, for error messages.

    Raises:
        UserError: the file cannot be imported, or has no such function.
    """
    function = find(path, name, flag)
    if not callable(function):
        raise UserError(f"expected a function {name} in {path} for {flag}, received none; define it, or name another")
    return function


def import_for(framework: str, path: Path, name: str, flag: str) -> Callable[..., Any]:
    """Return the function NAME_framework of a file if it exists, else NAME; a file may have one for each framework.

    Raises:
        UserError: see `import_function`.
    """
    return find(path, f"{name}_{framework}", flag) or import_function(path, name, flag)


def find(path: Path, name: str, flag: str) -> Any:
    """Return the object of that name in a file, or None.

    Raises:
        UserError: the file cannot be imported.
    """
    if not path.is_file():
        raise UserError(f"expected a Python file at {quote(path)} for {flag}, received none; name one")
    path = path.resolve()
    if path not in _modules:
        _modules[path] = _imported(path, flag)
    return getattr(_modules[path], name, None)


def call(function: Callable[..., Any], *arguments: object, flag: str) -> Any:
    """Call the user's function and return its result.

    Raises:
        UserError: the function raises an exception; the message names the line.
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
    sys.modules[name] = module  # dataclasses and pickle look it up there
    sys.path.append(str(path.parent))  # for modules in its folder; last, so that they shadow nothing
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _failed(error, f"{path} to be imported", flag) from error
    return module


def _failed(error: Exception, what: str, flag: str) -> UserError:
    frames = traceback.extract_tb(error.__traceback__)
    *_, frame = [frame for frame in frames if "site-packages" not in frame.filename]  # in user code, not in a library
    if isinstance(error, SyntaxError):
        where = f"line {error.lineno} of {error.filename}"
    else:
        where = f"line {frame.lineno} of {frame.filename}"
    return UserError(f"expected {what} for {flag}, received {quote(summary(error))} in {where}; fix it")


def check(word: str, flag: str) -> None:
    """Refuse a file that does not exist, before the run does any work.

    Raises:
        UserError: the file does not exist.
    """
    if (file := parse(word)) and not file[0].is_file():
        raise UserError(f"expected a Python file in {flag}, received {quote(word)}, which is not there; name another")


def parse(word: str) -> tuple[Path, str] | None:
    """Return file and function of FILE.py:FUNCTION, or None if `word` does not have that form."""
    file, _, function = word.rpartition(":")
    return (Path(file), function) if file.endswith(".py") and function.isidentifier() else None
