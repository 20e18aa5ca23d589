"""Results of the programs in `proofs/`: figures with their targets and raw samples."""

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
    """Name of the measured quantity, with its unit."""
    ours: float
    reference: float
    ratio: float
    """The figure itself: ours over the reference, or their difference if the target is one."""
    target: Annotated[str, matching(_TARGET, "as in >= 0.98, or empty")]
    """`>= 0.98` or `<= 0.01`; empty for a figure without a target."""

    @property
    def reached(self) -> bool:
        """Whether the ratio reaches the target; true without a target."""
        if not self.target:
            return True
        relation, bound = self.target.split()
        return self.ratio >= float(bound) if relation == ">=" else self.ratio <= float(bound)


def missing(what: str, why: str) -> Figure:
    """Return a row for a figure that could not be measured, with a target that is not reached."""
    return Figure(f"{what}: {why}", math.nan, math.nan, math.nan, "<= 0")


@dataclass(frozen=True)
class BenchmarkResult:
    """A result of a benchmark."""

    FORMAT: ClassVar[str] = "allstep-benchmark"
    VERSION: ClassVar[int] = 1

    figures: tuple[Figure, ...]
    samples: Any
    """Measurements of each round, by name; the form depends on the benchmark."""
    time: str | None = None
    load_average: tuple[float, ...] | None = None
    num_cores: int | None = None


@dataclass(frozen=True)
class Handwritten:
    """Results of a hand-written script with which a trainer is compared."""

    images_per_second: tuple[float, ...]
    """Images per second of each epoch."""
    losses: tuple[float, ...] = ()
    """Mean loss of each global batch."""
