"""Records that a measured rank writes: timed blocks of steps, epochs, memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from allstep.common.files.records import Count, NonNegative, Positive
from allstep.common.files.schema import list_of, number


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
