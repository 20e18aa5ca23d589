"""Findings: each names a fault of a script, its evidence, the script's line if known, and the fix."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One fault of a script."""

    name: str
    """Name of this kind of fault; docs/prove.md lists them."""
    what: str
    evidence: str
    """Ranks, steps, tensors or samples that show the fault."""
    mend: str
    """Change of the script that fixes the fault."""
    line: str = ""
    """FILE:NUMBER in the script, or empty."""

    def __str__(self) -> str:
        where = f" ({self.line})" if self.line else ""
        return f"{self.name}{where}: {self.what}\n  evidence: {self.evidence}\n  mend: {self.mend}"


_MAX_NAMES = 4


def listed(names: Collection[object]) -> str:
    """Return the first names in a line, and how many more there are."""
    first, num_more = ", ".join(map(str, list(names)[:_MAX_NAMES])), len(names) - _MAX_NAMES
    return f"{first} and {num_more} more" if num_more > 0 else first


def ranks(numbers: Collection[int]) -> str:
    """Return ranks in words, such as `ranks 0 and 1`."""
    return f"rank{'s' if len(numbers) > 1 else ''} {' and '.join(map(str, numbers))}"
