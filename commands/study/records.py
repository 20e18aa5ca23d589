"""What `allstep study` keeps: study.json, with a line of results for every run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from allstep.commands.study.description import Description
from allstep.common.files.records import Count, NonNegative
from allstep.common.files.schema import Mismatch

SUMMARY = "study.json"


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """A run of a study that has ended."""

    variant: str
    seed: int
    diverged: bool
    """Whether its loss has become infinite."""
    seconds: NonNegative
    """From its launch to its end."""
    points: tuple[dict[str, float], ...]
    """What each event of metrics.jsonl had of the study's measures."""


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """study.json."""

    FORMAT: ClassVar[str] = "allstep-study"
    VERSION: ClassVar[int] = 1

    name: str
    description: Description
    variants: dict[str, tuple[str, ...]]
    """By name, the words of the command that trains it by seed 0."""
    seeds: Count
    command: str
    created: str
    updated: str
    num_cores: Count
    runs: tuple[StudyRun, ...]

    def __post_init__(self) -> None:
        for run in self.runs:
            if run.variant not in self.variants:
                raise Mismatch(f"expected runs of the study's variants, received one of {run.variant!r}")

    @property
    def finished(self) -> bool:
        """Whether every variant was trained by every seed."""
        return len(self.runs) == len(self.variants) * self.seeds
