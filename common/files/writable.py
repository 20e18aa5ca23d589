"""Checks that a path can be written, before a run starts and without leaving files behind."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path


def try_folder(path: Path) -> None:
    """Write a temporary file in the folder `path`, or in the nearest existing folder above it.

    Checking permission bits is not enough: they do not restrict root, and do not show that a file system is read-only.

    Raises:
        OSError: the folder cannot be written; `strerror` is the reason.
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
    """Try to write in the folder of the file `path`; refuse a path such as /dev/null, which must not be replaced.

    Raises:
        OSError: the path cannot be written; `strerror` is the reason.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "Something else than a file is there", os.fspath(path))
    try_folder(path.parent)
