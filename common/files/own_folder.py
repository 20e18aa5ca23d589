"""Folders that allstep wrote and may remove, recognised by the names in them; nothing is removed through a link.

A folder that holds anything else belongs to the user, whatever its own name is, and stays.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

IsOwn = Callable[[str], object]
"""Function that tells whether allstep writes files of a name into a kind of folder."""


def foreign_entries(folder: Path, is_own: IsOwn) -> list[str]:
    """Return the names in a folder that allstep did not write; the folder's own name if it is a link or no folder."""
    if not stat.S_ISDIR(folder.lstat().st_mode):
        return [folder.name]
    with os.scandir(folder) as entries:
        return sorted(
            entry.name for entry in entries if not (is_own(entry.name) and entry.is_file(follow_symlinks=False))
        )


def discard(folder: Path, is_own: IsOwn) -> None:
    """Remove a folder that holds nothing foreign.

    Raises:
        OSError: it holds something else, or cannot be removed.
    """
    if foreign := foreign_entries(folder, is_own):
        raise FileExistsError(f"{folder} holds {foreign[0]!a}, which allstep did not write")
    for name in os.listdir(folder):
        (folder / name).unlink()
    folder.rmdir()
