"""Observes which files the script opens to write, by Python's audit events, and keeps what they held.

What is written before training, such as a data set that is fetched, the run on several ranks finds as one rank has left
it. What is written later, such as a checkpoint, it must not find: its training begins where that of one rank began.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from allstep.commands.prove.observer.observer import Observer
from allstep.commands.prove.records import Write

_WRITING = os.O_WRONLY | os.O_RDWR
# A lock is for all ranks to open; the others are files of the system.
_NOT_LOOKED_AT = (".lock", "_lock", ".pyc")
_SYSTEM = ("/dev/", "/proc/", "/sys/")


def install(observer: Observer) -> None:
    """Look at every file that is opened from now on."""
    seen: set[str] = set()

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            is_written = bool(set(mode) & set("wxa+")) if isinstance(mode, str) else bool(flags & _WRITING)
            if is_written and isinstance(path, (str, os.PathLike)):
                note_write(observer, path, seen)

    sys.addaudithook(audit)


def note_write(observer: Observer, path: str | os.PathLike, seen: set[str]) -> None:
    """Write down that the script writes a file, once."""
    name = os.path.abspath(os.fspath(path))
    is_ours = os.path.dirname(name) == str(observer.folder)
    if name in seen or is_ours or name.startswith(_SYSTEM) or name.endswith(_NOT_LOOKED_AT) or os.path.isdir(name):
        return  # a folder is opened for a file without a name
    seen.add(name)
    if line := observer.line():  # else the script is not at work
        is_kept = observer.keeps_files and observer.num_steps_seen > 0
        aside = _keep(observer, name) if is_kept and os.path.isfile(name) else None
        observer.write(Write(name, line, is_kept and not os.path.lexists(name), aside))


def put_back(writes: Iterable[Write]) -> None:
    """Give the files that were written in training what they held before."""
    for write in writes:
        if write.aside:
            shutil.copy2(write.aside, write.path)
        elif write.is_new:
            Path(write.path).unlink(missing_ok=True)


def _keep(observer: Observer, path: str) -> str:
    kept = observer.folder / f"{len(os.listdir(observer.folder))}.kept"
    shutil.copy2(path, kept)
    return str(kept)
