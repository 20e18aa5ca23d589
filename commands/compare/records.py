"""What `allstep compare` keeps: compare.json, a file for each sample, and one for each verdict of the parity gate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from allstep.commands.compare.cells import INDEPENDENT, Cell, Settings
from allstep.commands.shared.estimate import Estimate
from allstep.commands.shared.jobs import Status
from allstep.commands.shared.machine import Environment
from allstep.commands.shared.records.measured import Block, EpochResult
from allstep.common.files.records import NonNegative
from allstep.common.files.schema import Mismatch

SUMMARY = "compare.json"


@dataclass(frozen=True)
class Sample:
    """A launch of a cell."""

    FORMAT: ClassVar[str] = "allstep-compare"
    VERSION: ClassVar[int] = 2

    cell_id: str
    round: int
    status: Status
    reason: str | None
    """One line where the status is not ok."""
    started: str
    load_average: tuple[float, ...]
    command: tuple[str, ...]
    """Of the first of its processes."""
    seconds: float
    log: str | None
    created: str | None = None
    """When the comparison was begun to which a file with this sample belongs."""
    # What a launch has that went well.
    blocks: tuple[Block, ...] = ()
    images_per_second: float | None = None
    startup_seconds: float | None = None
    peak_memory_bytes_by_rank: tuple[int, ...] = ()
    epochs: tuple[EpochResult, ...] | None = None
    seconds_to_target: float | None = None
    joules_per_image: float | None = None
    gpu_libraries: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Whether it may be counted, and need not be measured again."""
        return self.status == "ok"


@dataclass(frozen=True)
class Verdict:
    """Of the parity gate, on a curve."""

    FORMAT: ClassVar[str] = "allstep-compare"
    VERSION: ClassVar[int] = 2

    status: Literal["passed", "failed", "none"]
    reason: str | None = None
    """One line where it has not passed."""
    num_steps: int | None = None
    reference: str | None = None
    """The id of the run whose curve this one was held against."""
    loss_difference: float | None = None
    weight_difference: float | None = None
    bound: float | None = None
    log: str | None = None
    created: str | None = None
    """When the comparison was begun to which a file with this verdict belongs."""

    @property
    def good(self) -> bool:
        """Whether the curve need not be trained again."""
        return self.status == "passed"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Status and statistics of a cell, over its samples."""

    status: Literal["ok", "partial", "failed", "pending", "unavailable"]
    reason: str | None
    images_per_second: Estimate | None
    startup_seconds: Estimate | None
    seconds_to_target: Estimate | None
    final_accuracy: float | None
    peak_memory_bytes_by_rank: tuple[NonNegative, ...] | None
    curve: tuple[EpochResult, ...] | None
    joules_per_image: Estimate | None = None
    """None where GPUs do not count it, and on CPUs."""
    gpu_libraries: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By library, the files from which rank 0 had loaded it."""


@dataclass(frozen=True, kw_only=True)
class CellResult(Summary, Cell):
    """A cell with all that is known of it."""

    gate: Verdict
    comparable: bool
    """Whether it may be held against others."""
    command: str
    samples: tuple[str, ...]
    """Files, relative to compare.json."""
    target_accuracy: float | None
    efficiency: dict[str, Estimate] | None
    """Ratios of its speed to those of others, within rounds, by `samples.efficiency`'s names."""
    against: dict[str, Estimate]
    """By strategy, the same for its rivals in the ranking."""

    def __post_init__(self) -> None:
        if self.comparable and not self.images_per_second:
            raise Mismatch(f"expected images_per_second where {self.id} is comparable, received none")

    @property
    def share_of_limit(self) -> Estimate | None:
        """Its speed over that of as many independent processes, the machine's limit.

        None for the limit itself, and where nothing was measured or may be compared.
        """
        return None if self.strategy == INDEPENDENT else (self.efficiency or {}).get("independent")


@dataclass(frozen=True, kw_only=True)
class ComparisonResult:
    """compare.json."""

    FORMAT: ClassVar[str] = "allstep-compare"
    VERSION: ClassVar[int] = 2

    created: str
    updated: str
    finished: bool
    command: str
    settings: Settings
    num_rounds: int
    rules: tuple[str, ...]
    environment: Environment
    cells: tuple[CellResult, ...]
