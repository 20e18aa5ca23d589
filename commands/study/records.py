"""Results of `allstep study`: study.json, with the results of every run."""

from dataclasses import dataclass
from typing import ClassVar

from allstep.commands.study.description import Description
from allstep.common.files.schema import Count, Mismatch, NonNegative

SUMMARY = "study.json"


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """A run of a study that has ended."""

    variant: str
    seed: int
    diverged: bool
    """Whether the loss became infinite."""
    seconds: NonNegative
    """Seconds from launch to end."""
    points: tuple[dict[str, float], ...]
    """The study's measures in each event of metrics.jsonl."""


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """Contents of study.json."""

    FORMAT: ClassVar[str] = "allstep-study"
    VERSION: ClassVar[int] = 1

    name: str
    description: Description
    variants: dict[str, tuple[str, ...]]
    """Words of the command that trains each variant with seed 0, by name."""
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
        """Whether every variant was trained with every seed."""
        return len(self.runs) == len(self.variants) * self.seeds
