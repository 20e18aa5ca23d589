"""Observe which files the script opens for writing, by Python's audit events, and keep their previous contents.

Files written before training, such as a downloaded data set, are left for the run on several ranks. Files written
later, such as checkpoints, are not, since training on several ranks must begin like that on one rank.
"""

import os
import shutil
import sys
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

from allstep.commands.prove.observer.observer import Observer, replace, replace_everywhere
from allstep.commands.prove.observer.start import hook_modules
from allstep.commands.prove.records import Read, Write

_WRITING = os.O_WRONLY | os.O_RDWR
# All ranks may open a lock file; the others are files of the system.
_NOT_LOOKED_AT = (".lock", "_lock", ".pyc")
_SYSTEM = ("/dev/", "/proc/", "/sys/")

_IN_C = "files that libraries open in C, C++ or Rust"
"""Files of which Python raises no audit event."""
_SAVERS = ("torch.serialization", "torch.jit._serialization", "torch.export", "safetensors")


def install(observer: Observer) -> None:
    """Observe every file that is opened from now on."""
    seen: set[str] = set()
    read: set[Any] = set()

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename" and observer.keeps_files:
            note_rename(*map(os.path.abspath, map(os.fsdecode, arguments[:2])))
        elif event == "open":
            path, mode, flags = arguments
            is_written = bool(set(mode) & set("wxa+")) if isinstance(mode, str) else bool(flags & _WRITING)
            if is_written:
                note_write(observer, path, seen)
            elif seen and isinstance(path, (str, os.PathLike)):
                note_read(os.path.abspath(os.fspath(path)))

    def note_read(path: Any) -> None:
        if path not in read and os.path.dirname(path) in map(os.path.dirname, seen) and observer.line():
            read.add(path)
            observer.write(Read(path))

    def note_rename(old: str, new: str) -> None:
        """Record what gets the name of a written file, as of a checkpoint that is complete, or of its folder."""
        for path in [one for one in seen if f"{one}/".startswith(f"{old}/")]:
            note_write(observer, new + path.removeprefix(old), seen)

    def observe_hdf5(
        _file: Any, name: Any = None, mode: str = "r", driver: str | None = None, *_args: Any, **_kwargs: Any
    ) -> Generator[None, Any, None]:
        if mode != "r" and driver is None:
            note_write(observer, name, seen)
        yield

    def observe_save(_object: Any, path: Any, *_args: Any, **_kwargs: Any) -> Generator[None, Any, None]:
        note_write(observer, path, seen)
        yield

    sys.addaudithook(observer.quiet("written files", audit))

    def hook_hdf5(module: Any) -> None:
        replace(module.File, "__init__", observer.around(_IN_C, observe_hdf5))

    def hook_save(module: Any) -> None:
        name = "serialize_file" if module.__name__ == "safetensors" else "save"
        package = module.__name__.partition(".")[0]
        replace_everywhere(package, module, name, observer.around(_IN_C, observe_save))

    hook_modules(observer, {"h5py._hl.files": hook_hdf5, **dict.fromkeys(_SAVERS, hook_save)})


def note_write(observer: Observer, path: Any, seen: set[str]) -> None:
    """Record once that the script writes a file, unless it has no path."""
    if not isinstance(path, (str, os.PathLike)):
        return
    name = os.path.abspath(os.fspath(path))
    is_ours = os.path.dirname(name) == str(observer.folder)
    if name in seen or is_ours or name.startswith(_SYSTEM) or name.endswith(_NOT_LOOKED_AT) or os.path.isdir(name):
        return  # a folder is opened to create a file without a name (O_TMPFILE)
    seen.add(name)
    if line := observer.line():  # else no line of the script is being run
        is_kept = observer.keeps_files and observer.progress.num_steps > 0
        aside = _keep(observer, name) if is_kept and os.path.isfile(name) else None
        observer.write(Write(name, line, is_kept and not os.path.lexists(name), aside, observer.callers()))


def put_back(writes: Iterable[Write]) -> None:
    """Restore the previous contents of the files that were written in training."""
    for write in writes:
        if write.aside:
            shutil.copy2(write.aside, write.path)
        elif write.is_new:
            Path(write.path).unlink(missing_ok=True)


def _keep(observer: Observer, path: str) -> str:
    kept = observer.folder / f"{len(os.listdir(observer.folder))}.kept"
    shutil.copy2(path, kept)
    return str(kept)
