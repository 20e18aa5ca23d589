"""Results of `allstep compare`: compare.json, a file for each sample, and one for each verdict of the parity gate."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from allstep.commands.compare.cells import INDEPENDENT, Cell, Settings
from allstep.commands.shared.jobs import Status
from allstep.commands.shared.machine import Environment
from allstep.commands.shared.measure import Estimate
from allstep.commands.shared.records.measured import Block, EpochResult
from allstep.common.files.strict_json import Mismatch, NonNegative

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
    """One line if the status is not ok."""
    started: str
    load_average: tuple[float, ...]
    command: tuple[str, ...]
    """Command of the first process."""
    seconds: float
    log: str | None
    created: str | None = None
    """Start of the comparison that this sample belongs to."""
    # Only set if the launch succeeded.
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
        """Whether the sample counts and need not be measured again."""
        return self.status == "ok"


@dataclass(frozen=True)
class Verdict:
    """Verdict of the parity gate on a curve."""

    FORMAT: ClassVar[str] = "allstep-compare"
    VERSION: ClassVar[int] = 2

    status: Literal["passed", "failed", "none"]
    reason: str | None = None
    """One line if the status is not passed."""
    num_steps: int | None = None
    reference: str | None = None
    """Id of the run with whose curve this one was compared."""
    loss_difference: float | None = None
    weight_difference: float | None = None
    bound: float | None = None
    log: str | None = None
    created: str | None = None
    """Start of the comparison that this verdict belongs to."""

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
    """None on CPUs, and on GPUs that do not count energy."""
    gpu_libraries: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Files from which rank 0 loaded NVIDIA's libraries, by library."""


@dataclass(frozen=True, kw_only=True)
class CellResult(Summary, Cell):
    """A cell with all its results."""

    gate: Verdict
    comparable: bool
    """Whether the cell may be compared with others."""
    command: str
    samples: tuple[str, ...]
    """Paths of the samples' files, relative to compare.json."""
    target_accuracy: float | None
    efficiency: dict[str, Estimate] | None
    """Ratios of its speed to those of other cells, within rounds, by the names of `samples.efficiency`."""
    against: dict[str, Estimate]
    """Ratios of its speed to those of its rivals in the ranking, by strategy."""

    def __post_init__(self) -> None:
        if self.comparable and not self.images_per_second:
            raise Mismatch(f"expected images_per_second where {self.id} is comparable, received none")

    @property
    def share_of_limit(self) -> Estimate | None:
        """Speed over that of as many independent processes, the machine's limit.

        None for the limit itself, and if one of the two was not measured or is not comparable.
        """
        return None if self.strategy == INDEPENDENT else (self.efficiency or {}).get("independent")


@dataclass(frozen=True, kw_only=True)
class ComparisonResult:
    """Contents of compare.json."""

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
