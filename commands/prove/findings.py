"""What is wrong with a script: a finding has a name, evidence, the script's line where it can, and what mends it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    name: str
    """Of its kind; docs/prove.md lists them."""
    what: str
    evidence: str
    """Ranks, steps, tensors, samples."""
    mend: str
    """The change of code."""
    line: str = ""
    """FILE:NUMBER, or empty."""

    def __str__(self) -> str:
        where = f" ({self.line})" if self.line else ""
        return f"{self.name}{where}: {self.what}\n  evidence: {self.evidence}\n  mend: {self.mend}"


def listed(names: Collection[object], *, maximum: int = 4) -> str:
    """Names in a line: the first ones, and how many more there are."""
    first = ", ".join(map(str, list(names)[:maximum]))
    return f"{first} and {len(names) - maximum} more" if len(names) > maximum else first


def ranks(numbers: Collection[int]) -> str:
    """Ranks in words."""
    return f"rank{'s' if len(numbers) > 1 else ''} {' and '.join(map(str, numbers))}"
