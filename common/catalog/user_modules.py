"""Imports of users' files: each finds the modules in its own folder first, and none of another user's file.

While a file is imported, or one of its functions called, its folder is first on `sys.path`, and modules of the same
names from elsewhere are hidden. Where names collide, an import that runs later, as in a `forward`, is recognised by the
file that it stands in.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from allstep.common.base.errors import UserError, quote

_ONCE = frozenset(("allstep", "horovod", "keras", "mpi4py", "numpy", "tensorflow", "torch")) | sys.stdlib_module_names
"""Modules that stay as they are once they are imported: Python's, and packages that cannot be imported twice."""
_PACKAGES = "/site-packages/", "/dist-packages/"
"""Folders of packages; Debian's Python has the second."""
_LOCK = threading.RLock()
_import = builtins.__import__
_folders: dict[Path, Folder] = {}
_colliding: list[Folder] = []
_running: list[Folder] = []
"""Folders whose code runs, the innermost last."""


def run_file(path: Path) -> ModuleType:
    """Run a file as a module, with its folder first. Raises what the file raises."""
    folder = _folder_of(path)
    with running(path):
        if folder.root != folder.path:
            parts = path.relative_to(folder.root).with_suffix("").parts
            return importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
        name = f"allstep_user_{path.stem}"
        name += f"_{len(_folders)}" if name in sys.modules else ""
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader  # it is a file whose name ends in .py
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and pickle look it up there
        spec.loader.exec_module(module)
        return module


@contextlib.contextmanager
def running(path: Path) -> Iterator[None]:
    """Run a block that calls the code of a file: its folder is first on the path, `sys.argv` has only the file,
    `os._exit` raises SystemExit in this process, so that it ends only children at once, and the working folder is the
    same afterwards.

    Raises UserError if the code closes file descriptors that it did not open.
    """
    arguments, process, end = sys.argv[:], os.getpid(), os._exit

    def end_child(status: int) -> None:
        (sys.exit if os.getpid() == process else end)(status)

    sys.argv[:] = [str(path)]
    os._exit = end_child
    mark = os.open(".", os.O_PATH)
    opened = {number: status for number in (1, 2, mark) if (status := _status(number))}
    try:
        with _folder_of(path).first():
            yield
    finally:
        sys.argv[:], os._exit = arguments, end
        are_open = all(_status(number) == status for number, status in opened.items())
        if are_open:
            os.fchdir(mark)
            os.close(mark)
    if not are_open:
        raise UserError(
            f"{quote(path)} closes what it did not open, as os.closerange closes output and connections of the launcher"
        )


def _status(descriptor: int) -> tuple[int, int] | None:
    """Return what tells an open file from others, or None if it is closed."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def is_installed(file: str) -> bool:
    """Return whether a file belongs to an installed package, of this environment or another."""
    return any(folder in file for folder in _PACKAGES)


class Folder:
    """Folder of a user's files, with the modules that were imported from it."""

    def __init__(self, path: Path) -> None:
        self.path = self.root = path
        while (self.root / "__init__.py").is_file():
            self.root = self.root.parent
        self.paths = [str(folder) for folder in dict.fromkeys((path, self.root))]
        self.names = set() if is_installed(f"{path}/") else _names_in(path)
        """Names of its modules and packages. What is installed is imported as always."""
        if self.root != path:
            self.names.add(path.relative_to(self.root).parts[0])
        self.modules: dict[str, ModuleType] = {}
        """Modules imported so far, by name; hidden while code of a folder with modules of these names runs."""

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Let imports in the block find this folder's modules, and none of the same names from elsewhere."""
        if _running[-1:] == [self]:
            yield
            return
        with _LOCK:
            hidden = {name: module for name, module in _loaded(self.names).items() if self._hides(name, module)}
            _exchange(hidden, self.modules)
            sys.path[:0] = self.paths
            _running.append(self)
            try:
                yield
            finally:
                _running.pop()
                for path in self.paths:
                    sys.path.remove(path)
                found = _loaded(self.names)
                self.modules |= {name: module for name, module in found.items() if self.has(_file_of(module))}
                tops = {_top(name) for name in hidden}
                _exchange({name: found[name] for name in found if _top(name) in tops}, hidden)

    def has(self, file: object) -> bool:
        """Return whether a file is in this folder or its package."""
        start = self.path if self.root == self.path else self.root / self.path.relative_to(self.root).parts[0]
        return isinstance(file, str) and file.startswith(f"{start}{os.sep}")

    def _hides(self, name: str, module: ModuleType) -> bool:
        file = _file_of(module)
        if self.has(file) or _top(name) in _ONCE:
            return False
        # A folder without __init__.py is a package only if no other is found.
        is_certain = any((Path(path) / _top(name)).with_suffix(".py").is_file() for path in self.paths) or any(
            (Path(path) / _top(name) / "__init__.py").is_file() for path in self.paths
        )
        return is_certain or any(folder.has(file) for folder in _folders.values())


def _folder_of(path: Path) -> Folder:
    if path.parent not in _folders:
        folder = Folder(path.parent)
        others = [other for other in _folders.values() if other.names & folder.names]
        _folders[path.parent] = folder
        sys.path.extend(one for one in folder.paths if one not in sys.path)  # for imports that run later
        if others or any(folder._hides(name, module) for name, module in _loaded(folder.names).items()):
            _colliding.extend(one for one in (folder, *others) if one not in _colliding)
            _colliding.sort(key=lambda one: -len(one.path.parts))
            builtins.__import__ = _import_for_user
    return _folders[path.parent]


def _import_for_user(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    """Import like Python, but look first in the folder of the user's file that the importing code belongs to."""
    variables = globals or {}
    top = _top(variables.get("__package__") or "" if level else name)
    file = variables.get("__file__")
    for folder in _colliding:
        if top in folder.names and folder.has(file):
            with folder.first():
                return _import(name, globals, locals, fromlist, level)
    return _import(name, globals, locals, fromlist, level)


def _names_in(folder: Path) -> set[str]:
    """Return the names under which files and folders with Python code can be imported."""
    names = set()
    with contextlib.suppress(OSError):  # a folder that cannot be listed
        for path in folder.iterdir():
            if path.suffix == ".py" or (path.name.isidentifier() and path.is_dir() and any(path.glob("*.py"))):
                names.add(path.stem)
    return names


def _loaded(tops: Collection[str]) -> dict[str, ModuleType]:
    """Return the imported modules and packages with these names, and all modules in them."""
    return {name: module for name, module in list(sys.modules.items()) if _top(name) in tops and module is not None}


def _exchange(removed: Collection[str], added: Mapping[str, ModuleType]) -> None:
    for name in removed:
        sys.modules.pop(name, None)
    sys.modules.update(added)


def _file_of(module: ModuleType) -> object:
    """Return the file of a module, or a folder of a package that has none."""
    return getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)


def _top(name: str) -> str:
    return name.partition(".")[0]
