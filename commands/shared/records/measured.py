"""Measurements: what a measured rank writes (blocks of steps, epochs, memory), and figures with their targets."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from allstep.common.files.strict_json import Count, NonNegative, Positive, list_of, matching, number


@dataclass(frozen=True)
class Block:
    """Several steps, or an epoch, timed on all ranks."""

    DERIVED: ClassVar[tuple[str, ...]] = ("images_per_second",)

    num_images: Count
    """Images of all ranks."""
    seconds_by_rank: Annotated[tuple[Positive, ...], list_of(number(1e-30), minimum=1)]
    joules: NonNegative | None = None
    """Energy that the ranks' GPUs took; None if they do not count it."""

    @property
    def images_per_second(self) -> float:
        """Images of all ranks over the time of the slowest rank."""
        return self.num_images / max(self.seconds_by_rank)


@dataclass(frozen=True)
class EpochResult:
    """A point of a cell's training curve."""

    epoch: int
    train_loss: float
    validation_loss: float
    validation_accuracy: float
    seconds: float
    """Training time from the start to the end of this epoch."""


@dataclass(frozen=True)
class Measured:
    """Measurements that a process writes for `allstep compare`; rank 0 writes those of all ranks of a job."""

    blocks: tuple[Block, ...]
    peak_memory_bytes_by_rank: tuple[int, ...]
    first_step_at: float | None
    """Unix time of the end of the first step; None with real input."""
    epochs: tuple[EpochResult, ...] | None
    """The training curve; None with synthetic input."""
    gpu_libraries: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Files from which rank 0 loaded NVIDIA's libraries, by library."""


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

    @property
    def verdict(self) -> str:
        """Whether the ratio reaches the target, as tables have it; empty without a target."""
        return ("yes" if self.reached else "NO") if self.target else ""


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
