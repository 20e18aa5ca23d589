"""What the programs in `proofs/` keep: figures beside their targets, with raw samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from allstep.common.files.schema import matching

_TARGET = r"([<>]= \d+(\.\d+)?(e-?\d+)?)?"


@dataclass(frozen=True)
class Figure:
    """One row of the table."""

    DERIVED: ClassVar[tuple[str, ...]] = ("reached",)

    what: str
    """What was measured, with its unit."""
    ours: float
    reference: float
    ratio: float
    """The figure itself, made of the other two; a difference where `target` is one."""
    target: Annotated[str, matching(_TARGET, "as in >= 0.98, or empty")]
    """`>= 0.98` or `<= 0.01`; empty for a figure without one."""

    @property
    def reached(self) -> bool:
        """Whether the ratio meets the target; always, where there is none."""
        if not self.target:
            return True
        relation, bound = self.target.split()
        return self.ratio >= float(bound) if relation == ">=" else self.ratio <= float(bound)


def missing(what: str, why: str) -> Figure:
    """A row in place of a figure that could not be measured; it is not reached."""
    return Figure(f"{what}: {why}", math.nan, math.nan, math.nan, "<= 0")


@dataclass(frozen=True)
class BenchmarkResult:
    """A result of a benchmark."""

    FORMAT: ClassVar[str] = "allstep-benchmark"
    VERSION: ClassVar[int] = 1

    figures: tuple[Figure, ...]
    samples: Any
    """By name, what was measured in each round; a benchmark's own."""
    time: str | None = None
    load_average: tuple[float, ...] | None = None
    num_cores: int | None = None


@dataclass(frozen=True)
class Handwritten:
    """What a hand-written script writes, beside which a trainer is measured."""

    images_per_second: tuple[float, ...]
    """By epoch."""
    losses: tuple[float, ...] = ()
    """The mean loss of each global batch."""
