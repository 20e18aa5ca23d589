"""The section of profiles by --profile: the costliest operators of each rank, and shares of its time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from allstep.commands.shared.page.document import Section, Table, amount, share
from allstep.common.files.records import Count, NonNegative, Positive


@dataclass(frozen=True, kw_only=True)
class Operator:
    """Operator of the framework, or kernel of a GPU."""

    name: str
    calls: Count
    seconds: float
    """Time in all calls, without what they call."""


@dataclass(frozen=True, kw_only=True)
class ProfileResult:
    """Contents of profile/rank-N.json, which `common.training.profiling` writes."""

    FORMAT: ClassVar[str] = "allstep-profile"
    VERSION: ClassVar[int] = 1

    rank: int
    first_step: int
    last_step: int
    seconds: Positive
    """Length of the profiled steps and the time between them."""
    input: NonNegative
    """Share of the time between steps."""
    communication: NonNegative
    """Share of the time in which a collective is under way or waited for within steps."""
    compute: NonNegative
    """Share that is left."""
    operators: tuple[Operator, ...]
    """Costliest operators first."""


def profile(path: Path, result: ProfileResult) -> Section:
    """Return the section of a rank's profile."""
    title = f"Profile of rank {result.rank}: {path.parent.parent.name}, steps {result.first_step} to {result.last_step}"
    parts = (("input", result.input), ("compute", result.compute), ("communication", result.communication))
    shares = [[name, share(value), amount(1000 * value * result.seconds)] for name, value in parts]
    rows = [
        [one.name, f"{one.calls:,}", amount(1000 * one.seconds), share(one.seconds / result.seconds)]
        for one in result.operators
    ]
    return Section(
        title,
        text=["Input is the time between steps; operators count without what they call, on all threads."],
        tables=[
            Table("Shares of the time", ["", "share", "ms"], shares),
            Table("The costliest operators", ["", "calls", "ms", "of the time"], rows),
        ],
    )
