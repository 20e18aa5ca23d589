"""A checked replacement of text in a source tree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Edit:
    path: str  # of the file, from the root of the source
    old: str  # the text to replace, found exactly `count` times in the file
    new: str
    reason: str
    count: int = 1


class EditFailed(Exception):
    """An edit does not fit the source."""


def apply_edits(source: Path, edits: Iterable[Edit]) -> None:
    """Apply `edits` in order to the tree at `source`.

    Raises:
        EditFailed: a text is not found, or not as often as the edit says; the source is another.
    """
    for edit in edits:
        file = source / edit.path
        if not file.exists():
            raise EditFailed(f"{edit.path}: there is no such file ({edit.reason})")
        text = file.read_text(encoding="utf-8")
        found = text.count(edit.old)
        if found != edit.count:
            raise EditFailed(
                f"{edit.path}: expected {edit.count} times, found {found} times: {edit.old!r} ({edit.reason})"
            )
        file.write_text(text.replace(edit.old, edit.new), encoding="utf-8")
