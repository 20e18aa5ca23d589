"""Temporary folders of commands; the next start of a command removes those of its processes that were killed."""

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HOLDER = ".process"


@contextmanager
def scratch_folder(command: str) -> Iterator[Path]:
    """Yield a new folder for temporary files of a command, and remove it when the block ends.

    The process holds a lock on a file in it, which the kernel releases however the process ends.
    """
    _remove_left_over(command)
    with tempfile.TemporaryDirectory(prefix=f"allstep-{command}-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        unnamed = folder / f"{_HOLDER}.new"
        with open(unnamed, "x") as holder:
            fcntl.flock(holder, fcntl.LOCK_EX)
            unnamed.rename(folder / _HOLDER)  # under this name it is locked from the start
            yield folder


def _remove_left_over(command: str) -> None:
    pattern = re.compile(rf"allstep-{command}-\w{{8}}")
    for path in Path(tempfile.gettempdir()).iterdir():
        if pattern.fullmatch(path.name):
            with contextlib.suppress(OSError):  # it belongs to another user, or is being removed
                _remove_if_dead(path)


def _remove_if_dead(path: Path) -> None:
    """Remove a folder of this user whose process has ended. Raises OSError if it has not."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return
    descriptor = os.open(path / _HOLDER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor) as holder:
        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
