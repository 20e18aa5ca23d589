"""Files of a data set's folder, at any depth; hidden ones are counted as passed over."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from allstep.common.data.passed_over import PassedOver

HIDDEN = "hidden files"


def files_below(
    folder: Path, passed: PassedOver, *, within: Path | None = None, without: Path | None = None
) -> list[str]:
    """Return the relative paths of all files, folder by folder as torchvision's ImageFolder lists them.

    Links are followed, except to a folder around them. Broken links are listed, since they are files that cannot be
    read rather than absent ones. `within` is a folder around `folder` to which no link is followed, either; `without`
    is left out.
    """
    around = frozenset([_identity(within)] if within else [])
    found = sorted(_folders(folder, passed, around, without))
    return [os.path.join(inside, name) for inside, names in found for name in sorted(names)]


def folders_in(folder: Path, passed: PassedOver) -> list[str]:
    """Return the names of the folders in a folder; files beside them are counted as passed over."""
    names = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if is_hidden(entry.name):
            passed.add(HIDDEN, entry.name)
        elif os.path.isdir(entry.path):
            names.append(entry.name)
        else:
            passed.add("files beside the class folders", os.path.join(folder.name, entry.name))
    return names


def is_hidden(path: str) -> bool:
    """Return whether a file or a folder around it is hidden, such as .DS_Store, ._0.jpg and .git/."""
    return any(name.startswith(".") and name not in (".", "..") for name in path.split("/"))


def _folders(
    folder: Path, passed: PassedOver, around: frozenset, without: Path | None
) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder's path relative to `folder`, and the names of its files."""
    pending, left_out = [("", around)], without and without.resolve()
    while pending:
        inside, around = pending.pop()
        here = os.path.join(folder, inside)
        if (identity := _identity(here)) in around:
            passed.add("links to a folder around them", inside)
            continue
        names = []
        for entry in os.scandir(here):
            if entry.name.startswith("."):
                passed.add(HIDDEN, os.path.join(inside, entry.name))
            elif entry.is_file(follow_symlinks=False) or not os.path.isdir(entry.path):
                names.append(entry.name)
            elif left_out is None or Path(entry.path).resolve() != left_out:
                pending.append((os.path.join(inside, entry.name), around | {identity}))
        yield inside, names


def _identity(folder: str | Path) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino
