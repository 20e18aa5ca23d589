"""Functions in a file of the user, such as `--dataset FILE.py:load`, which every rank imports once.

Such a file is arbitrary code. So only a flag can name one, never a checkpoint, a folder of data or another run's output
directory (see `trusted`), and rank 0 prints a line when it imports the file.
"""

import contextlib
import functools
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from allstep.common.base.errors import Fault, UserError, note, quote, summary
from allstep.common.catalog.user_modules import is_installed, run_file, running
from allstep.common.launch.placement import apparent_rank
from allstep.common.process.output import EXIT_CLOSED_PIPE

FLAGS = ("model", "dataset", "loss")
"""Flags that can name a function in a file."""
PROGRAM = "program"
"""Name of a model, data set or loss that a program passes as an object (see `common.api.session`)."""
_losses: list[Callable[..., Any]] = []
"""The loss that a program has passed last."""


def import_function(path: Path, name: str, flag: str) -> Callable[..., Any]:
    """Return the function of that name in a file.

    `flag` names file and function, for error messages. Raises UserError if the file cannot be imported, or has no such
    function.
    """
    function = find(path, name, flag)
    if not callable(function):
        raise UserError(f"expected a function {name} in {path} for {flag}, received none; define it, or name another")
    return function


def import_for(framework: str, path: Path, name: str, flag: str) -> Callable[..., Any]:
    """Return the function NAME_framework of a file if it exists, else NAME; a file may have one for each framework.

    Raises UserError as `import_function` does.
    """
    function = find(path, f"{name}_{framework}", flag)
    return import_function(path, name, flag) if function is None else function


def pass_loss(function: Callable[..., Any]) -> str:
    """Keep a loss of a program for `loss_for`, and return its name."""
    _losses[:] = [function]
    return PROGRAM


def loss_for(framework: str, word: str) -> Callable[..., Any] | None:
    """Return the loss of a file or a program that --loss names; None if it is a name of the suite.

    A class of losses, such as one of torch's modules, is called without arguments to build one. Raises UserError if
    there is no such loss, and as `import_for` and `call` do.
    """
    if word == PROGRAM:
        if not _losses:
            raise UserError(f"--loss {PROGRAM} is for programs that pass a loss to a Session; name another")
        loss = _losses[0]
    elif file := parse(word):
        loss = import_for(framework, *file, "--loss")
    else:
        return None
    return _object_of(loss) if isinstance(loss, type) else loss


@functools.cache
def _object_of(kind: type) -> Callable[..., Any]:
    return call(kind, flag="--loss")


def find(path: Path, name: str, flag: str) -> Any:
    """Return the object of that name in a file, or None. Raises UserError if the file cannot be imported."""
    if not path.is_file():
        raise UserError(f"expected a Python file at {quote(path)} for {flag}, received none; name one")
    path = path.resolve()
    if path not in _modules:
        _modules[path] = _imported(path, flag)
    found = getattr(_modules[path], name, None)
    _files[id(found)] = found, path
    return found


def call(function: Callable[..., Any], *arguments: object, flag: str, expected: str = "", **options: object) -> Any:
    """Call the user's function once, with the folder of its file first, and return its result.

    Raises UserError as `call_often` does.
    """
    _, path = _files.get(id(function), (None, None))
    with running(path) if path else contextlib.nullcontext():
        return call_often(function, *arguments, flag=flag, expected=expected, **options)


def call_often(
    function: Callable[..., Any], *arguments: object, flag: str, expected: str = "", **options: object
) -> Any:
    """Call the user's function and return its result.

    `expected` says in the message what the call should do, by default to return. Raises UserError, with the line of the
    user's code, if the function raises an exception.
    """
    try:
        return function(*arguments, **options)
    except (UserError, Fault):
        raise
    except (Exception, SystemExit) as error:  # sys.exit() would end the run as if it had trained
        raise _failed(error, expected or f"{name_of(function)}() to return", flag) from error


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, or the class of an object that is called like one."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


_modules: dict[Path, ModuleType] = {}
_files: dict[int, tuple[Any, Path]] = {}
"""Objects that were found in files, by identity, with their files; kept, so that no other object gets the identity."""


def _imported(path: Path, flag: str) -> ModuleType:
    if apparent_rank() == 0:
        note(f"{flag} imports {path}")
    return call_often(run_file, path, flag=flag, expected=f"{path} to be imported")


_OUR_FILES = re.compile(rf"^<frozen|^{re.escape(str(Path(__file__).parent))}")
"""Files whose lines do not help a user."""


def _failed(error: BaseException, what: str, flag: str) -> UserError:
    if isinstance(error, SystemExit) and error.code == EXIT_CLOSED_PIPE:
        raise error  # the reader of what the code prints is gone
    if isinstance(error, SyntaxError):
        where = f" in line {error.lineno} of {error.filename}"
    else:
        *_, where = ["", *_lines_of_user(error)]
    return UserError(f"expected {what} for {flag}, received {quote(summary(error))}{where}; fix it")


def _lines_of_user(error: BaseException) -> Iterator[str]:
    """Yield the lines of user code in the error's stack: neither a library's nor ours."""
    for frame, number in traceback.walk_tb(error.__traceback__):
        file, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
        if not _OUR_FILES.search(file) and not is_installed(file) and not module.startswith("allstep."):
            yield f" in line {number} of {file}"


def check(word: str, flag: str) -> None:
    """Refuse a file that does not exist, before the run does any work."""
    if (file := parse(word)) and not file[0].is_file():
        raise UserError(f"expected a Python file in {flag}, received {quote(word)}, which is not there; name another")


def trusted(word: object, named: Sequence[str]) -> str | None:
    """Return `word`, a flag's value in the files of a run, if it names no code; else the user's own word for that code.

    `named` are the words on the command line; a file that was moved is found by its name. The result is None for code
    that the user has not named, which must not be imported.
    """
    if not (code := parse(str(word))):
        return str(word)
    for other in named:
        if (same := parse(other)) and (same[0].name, same[1]) == (code[0].name, code[1]):
            return str(word) if same[0].resolve() == code[0].resolve() else other
    return None


def trusted_flags(flags: Mapping[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """Return the flags of a run, with the user's own words for code; refuse code that the user has not named."""
    words = {name: trusted(flags[name], named) for name in FLAGS if flags.get(name) is not None}
    for name in (name for name, word in words.items() if word is None):
        raise UserError(
            f"the --{name} of the run is code, which runs only if you name it too: add --{name} {quote(flags[name])}"
        )
    return {**flags, **words}


def parse(word: str) -> tuple[Path, str] | None:
    """Return file and function of FILE.py:FUNCTION, or None if `word` does not have that form."""
    file, _, function = word.rpartition(":")
    return (Path(file), function) if file.endswith(".py") and function.isidentifier() else None
