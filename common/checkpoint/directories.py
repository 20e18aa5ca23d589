"""Names of checkpoints on disk, which are taken and given up at once, so that a kill leaves no partial one behind.

What allstep removes it recognises as its own by full name and content.
"""

import contextlib
import os
import re
from pathlib import Path

from allstep.common.base.errors import UserError, quote
from allstep.common.checkpoint.manifest import file_name
from allstep.common.checkpoint.state import FILES
from allstep.common.files.disk import discard, foreign_entries, is_expendable, unused

MANIFEST = "manifest.json"
TEMPORARY = ".tmp-"  # prefix of checkpoints being written or deleted
REPLACED = ".old-"  # prefix of a complete checkpoint while a new one takes its name
_FILES = frozenset({MANIFEST, *map(file_name, FILES)})
_LEFT_OVER = re.compile(rf"({re.escape(TEMPORARY)}|{re.escape(REPLACED)})(step-\d{{8,}})")


def is_own_file(name: str) -> bool:
    """Return whether a file of that name in a checkpoint is allstep's; safetensors writes under a random name first."""
    return name in _FILES or re.fullmatch(r"\.tmp\w{6}", name) is not None


def remove(directory: Path) -> None:
    """Delete a checkpoint so that a kill never leaves a partial one under its name.

    Keep one that holds other files, or that its user protects from being written.
    """
    if not is_expendable(directory, is_own_file):
        return
    doomed = directory.with_name(TEMPORARY + directory.name)
    directory.rename(doomed)
    discard(doomed, is_own_file)


def remove_all(parent: Path) -> None:
    """Delete `parent`, a checkpoints directory, and its checkpoints, whole or partial, but for foreign files."""
    if not parent.is_dir() or parent.is_symlink():
        return
    for path in sorted(parent.iterdir()):
        if re.fullmatch(r"step-\d{8,}", path.name):
            remove(path)
        elif _LEFT_OVER.fullmatch(path.name) and not foreign_entries(path, is_own_file):
            discard(path, is_own_file)
    with contextlib.suppress(OSError):  # something else is there
        parent.rmdir()


def clean_up(parent: Path) -> None:
    """Clean up what killed runs have left in the checkpoints directory `parent`.

    Only the holder of the output directory's lock may call it; without the lock, another run may still use these files.
    Raises UserError if a name that allstep needs belongs to something that it did not write, OSError if a file cannot
    be moved or removed.
    """
    for path in sorted(parent.iterdir()):
        if not (match := _LEFT_OVER.fullmatch(path.name)):
            continue
        whole, foreign = path.with_name(match[2]), foreign_entries(path, is_own_file)
        if foreign and (match[1] == TEMPORARY or not _is_checkpoint(path)):
            raise UserError(f"{path} holds {quote(foreign[0])}, which allstep did not write; move it elsewhere")
        if match[1] == TEMPORARY:
            discard(path, is_own_file)
        elif whole.exists():
            _discard_replaced(path, whole)
        else:
            path.rename(whole)


def _is_checkpoint(path: Path) -> bool:
    return not path.is_symlink() and (path / MANIFEST).is_file()


def take_name(temporary: Path, directory: Path) -> None:
    # Renaming to a directory that is not empty fails. A run that resumes from an earlier checkpoint reaches the same
    # step again, so the old one is renamed first; meanwhile, readers find it by its prefix.
    replaced = directory.with_name(REPLACED + directory.name)
    if os.path.lexists(directory):
        foreign = foreign_entries(directory, is_own_file)
        if foreign and not _is_checkpoint(directory) and not any(map(is_own_file, foreign)):
            raise FileExistsError(f"its name belongs to {quote(foreign[0])}, which allstep did not write")
        directory.rename(replaced)
    temporary.rename(directory)
    sync(directory.parent)
    if replaced.exists():
        _discard_replaced(replaced, directory)


def _discard_replaced(replaced: Path, directory: Path) -> None:
    """Remove the checkpoint whose name `directory` has taken; files that a user put into it keep their path.

    One with a folder, a FIFO or a link in the place of a file is kept under another name, as is a protected one.
    """
    foreign = foreign_entries(replaced, is_own_file)
    is_protected = not os.access(replaced, os.W_OK)
    if is_protected or any(map(is_own_file, foreign)):
        kind = "protected" if is_protected else "damaged"
        replaced.rename(unused(directory.with_name(f"{directory.name}.{kind}")))
        return
    for name in foreign:
        (replaced / name).rename(directory / name)
    discard(replaced, is_own_file)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
