"""What the doctor says: a line for each thing that it looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "fault"]


@dataclass(frozen=True)
class Finding:
    """One line."""

    level: Level
    """fault: a job would fail, or compute something else than it should. warning: it would be slow, or may fail."""
    subject: str
    """What was looked at."""
    found: str
    fix: str = ""
    """What to do; empty where all is well."""
    host: str = ""
    """The host that it is about; empty where it is about all of them."""


def ok(subject: str, found: str) -> Finding:
    """A line about what is as it should be."""
    return Finding("ok", subject, found)


def warning(subject: str, found: str, fix: str) -> Finding:
    """A line about what makes a job slow, or may make it fail."""
    return Finding("warning", subject, found, fix)


def fault(subject: str, found: str, fix: str) -> Finding:
    """A line about what makes a job fail."""
    return Finding("fault", subject, found, fix)


def size(num_bytes: float) -> str:
    """As in 1.5 GB."""
    for unit, length in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= length:
            return f"{num_bytes / length:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def several(words: list[str], maximum: int = 3) -> str:
    """Some of the words in a list, and how many more there are."""
    more = len(words) - maximum
    return ", ".join(words[:maximum]) + (f" and {more} more" if more > 0 else "")
