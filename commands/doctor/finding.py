"""Findings of the doctor: one line per check."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "fault"]


@dataclass(frozen=True)
class Finding:
    """Result of a check, in one line."""

    level: Level
    """Severity: with a fault a job would fail or compute wrong results, with a warning it would be slow or may fail."""
    subject: str
    """Subject of the check."""
    found: str
    fix: str = ""
    """Advice; empty if there is no problem."""
    host: str = ""
    """Host that the finding is about; empty if it is about all of them."""


def ranks(number: int) -> str:
    """Format a number of ranks, as in 1 rank or 2 ranks."""
    return f"{number} rank{'s' if number != 1 else ''}"


def ok(subject: str, found: str) -> Finding:
    """Return a finding without a problem."""
    return Finding("ok", subject, found)


def warning(subject: str, found: str, fix: str) -> Finding:
    """Return a finding about a problem that makes a job slow, or may make it fail."""
    return Finding("warning", subject, found, fix)


def fault(subject: str, found: str, fix: str) -> Finding:
    """Return a finding about a problem that makes a job fail."""
    return Finding("fault", subject, found, fix)


def size(num_bytes: float) -> str:
    """Format a number of bytes, as in 1.5 GB."""
    for unit, length in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= length:
            return f"{num_bytes / length:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def several(words: list[str]) -> str:
    """Join the first words of a list, and append how many more there are."""
    more = len(words) - 3
    return ", ".join(words[:3]) + (f" and {more} more" if more > 0 else "")
