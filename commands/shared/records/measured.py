"""Records that a measured rank writes: timed blocks of steps, epochs, memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from allstep.common.files.records import Count, NonNegative, Positive
from allstep.common.files.schema import list_of, number


@dataclass(frozen=True)
class Block:
    """A number of steps, or an epoch, that was timed on all ranks."""

    DERIVED: ClassVar[tuple[str, ...]] = ("images_per_second",)

    num_images: Count
    """Of all ranks."""
    seconds_by_rank: Annotated[tuple[Positive, ...], list_of(number(1e-30), minimum=1)]
    joules: NonNegative | None = None
    """That the ranks' GPUs took meanwhile; None where they do not count it."""

    @property
    def images_per_second(self) -> float:
        """The slowest rank counts."""
        return self.num_images / max(self.seconds_by_rank)


@dataclass(frozen=True)
class EpochResult:
    """A point of the curve that a cell trained."""

    epoch: int
    train_loss: float
    validation_loss: float
    validation_accuracy: float
    seconds: float
    """Of training from its start to the end of this epoch."""


@dataclass(frozen=True)
class Measured:
    """What a measured process writes for `allstep compare`; of a launcher's job, rank 0 for all."""

    blocks: tuple[Block, ...]
    peak_memory_bytes_by_rank: tuple[int, ...]
    first_step_at: float | None
    """Unix time of the end of the first step; None with real input."""
    epochs: tuple[EpochResult, ...] | None
    """None with synthetic input."""
    gpu_libraries: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The files from which rank 0 had loaded each of NVIDIA's libraries."""
