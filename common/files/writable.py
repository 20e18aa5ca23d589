"""Whether something can be written, found out before anything is spent on it, and without leaving a trace."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path


def try_folder(path: Path) -> None:
    """Try to write where `path` is, or would be made.

    Who is root may write anywhere by its permissions, but not in a file system that lets nobody: so it is tried.

    Raises:
        OSError: its `strerror` says why not.
    """
    folder = path.absolute()
    while not _is_there(folder):
        folder = folder.parent
    with tempfile.TemporaryDirectory(dir=folder, prefix=".allstep-"):
        pass


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def try_file(path: Path) -> None:
    """Try to write in the folder of the file `path`; what is there and no file, as /dev/null, is not for us to replace.

    Raises:
        OSError: its `strerror` says why not.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "Something else than a file is there", os.fspath(path))
    try_folder(path.parent)
