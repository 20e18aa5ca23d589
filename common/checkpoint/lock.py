"""Output directory of a run, locked against a second run that would write to it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from allstep.common.base.errors import UserError
from allstep.common.base.resources import host_name
from allstep.common.files.disk import NO_LOCKS, regular

LOCK = ".lock"
_POLL_SECONDS = 0.05


class OutputDirectory:
    """Output directory to which only this process writes, from construction until `close`.

    Rank 0 holds the lock. The kernel releases it when the process ends in any way, including SIGKILL; the file `.lock`
    stays, and means nothing by itself. A child forked without exec shares the lock, and must not outlive the process.
    Raises UserError if the directory cannot be written, or another run has locked it.
    """

    def __init__(self, path: str | Path, *, warn: Callable[[str], None], max_wait: float = 0.0) -> None:
        """Lock the directory, after at most `max_wait` seconds in which another process has it."""
        self.path: Path = Path(path)
        self.warn: Callable[[str], None] = warn
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # Following a link would truncate another file below.
            self._descriptor = regular(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except OSError as error:
            raise _unwritable(self.path, error) from None
        try:
            self._lock(self._descriptor, time.monotonic() + max_wait)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 1000, 0).decode(errors="replace").strip()
            self.close()
            raise UserError(
                f"output directory {self.path} is in use by {holder or 'another process'}: "
                "wait for it to end, or choose another --output-dir"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            warn(
                f"the file system of {self.path} has no locks ({error.strerror}): "
                "make sure that no second run writes there"
            )
        if os.fstat(self._descriptor).st_nlink > 1 or not _is_own(os.pread(self._descriptor, 1000, 0)):
            self.close()
            raise UserError(
                f"{self.path / '.lock'} is a file that allstep did not write; move it, or choose another --output-dir"
            )
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"pid {os.getpid()} on host {host_name()}\n".encode(), 0)
        except OSError as error:  # a full disk
            self.close()
            raise _unwritable(self.path, error) from None

    def _lock(self, descriptor: int, deadline: float) -> None:
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_POLL_SECONDS)

    def check_is_same(self) -> None:
        """Check that the directory is still the locked one, before a file in it is written or deleted.

        Raises UserError if it was removed, and another run has locked one of the same name.
        """
        try:
            found = os.stat(self.path / LOCK, follow_symlinks=False)
        except FileNotFoundError:  # removed, but no other run has come
            return
        if self._descriptor is not None and not os.path.samestat(found, os.fstat(self._descriptor)):
            raise replaced(self.path)

    def close(self) -> None:
        """Release the lock. A second call does nothing."""
        if self._descriptor is not None:
            # A child that another thread is starting holds the lock until its exec.
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> OutputDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def replaced(path: Path) -> UserError:
    """Return the error of a run whose output directory another run has replaced."""
    return UserError(
        f"output directory {path} was removed or renamed while this run wrote to it, and belongs to another run now; "
        "this run ends to leave the other's files alone: start it again with another --output-dir"
    )


def _is_own(content: bytes) -> bool:
    """Return whether a lock file is empty, as after a full disk or a power cut, or names the process that held it."""
    return not content.strip(b"\0") or re.fullmatch(rb"pid \d+ on host .*\n", content) is not None


def _unwritable(path: Path, error: OSError) -> UserError:
    where = error.filename or path
    return UserError(f"expected an output directory that can be written, received {where}: {error.strerror}")
