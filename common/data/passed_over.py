"""Counts of what a data set leaves out, by reason: told in one line, so that nothing is left out silently."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field

from allstep.common.base.errors import quote, warn
from allstep.common.launch.placement import apparent_rank


@functools.cache
def tell(message: str) -> None:
    """Print a warning about the data: once a process, and on rank 0 alone."""
    if apparent_rank() == 0:
        warn(message)


@dataclass(frozen=True)
class PassedOver:
    """Counts of what is left out, with the first example of each reason."""

    found: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Number and first example by reason, such as "hidden files"."""

    def add(self, reason: str, example: object, count: int = 1) -> None:
        """Count something that is left out."""
        before, first = self.found.get(reason, (0, str(example)))
        self.found[reason] = before + count, first

    def add_all(self, reason: str, examples: Iterable[object]) -> None:
        """Count several things that are left out for one reason."""
        for example in examples:
            self.add(reason, example)

    def update(self, other: PassedOver) -> None:
        """Add the counts of another part of the data set."""
        for reason, (count, example) in other.found.items():
            self.add(reason, example, count)

    def __str__(self) -> str:
        return "; ".join(f"{reason}: {count}, such as {quote(first)}" for reason, (count, first) in self.found.items())

    def tell(self, where: object) -> None:
        """Tell in one line what was left out, if anything was."""
        if self.found:
            tell(f"{quote(where)}: passed over {self}")
