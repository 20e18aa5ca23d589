"""Results of `allstep collectives`, and of each of its ranks."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from allstep.common.files.strict_json import Count, NonNegative, Positive, whole


@dataclass(frozen=True)
class RankRow:
    """One collective at one size, measured on one rank."""

    collective: str
    bytes: Count
    right: bool
    """Whether the result was correct."""
    seconds: tuple[NonNegative, ...]
    """Seconds of each pass."""


@dataclass(frozen=True)
class RankResult:
    """Measurements of one rank in one launch of a library."""

    rows: tuple[RankRow, ...]
    missing: tuple[str, ...]
    """Collectives that the library does not have."""


@dataclass(frozen=True)
class OverRanks:
    """Minimum, average and maximum over ranks of a pass's seconds."""

    minimum: NonNegative
    average: Positive
    maximum: NonNegative


@dataclass(frozen=True)
class Row:
    """One collective of a library at one size."""

    backend: str
    collective: str
    bytes: Count
    seconds: OverRanks
    """Times of the fastest pass."""
    median_seconds: NonNegative
    """Median over passes of the average over ranks."""
    algorithm_bandwidth: Positive
    """Bytes per second; both bandwidths as nccl-tests define them."""
    bus_bandwidth: Positive
    right: bool
    """Whether every result on every rank was correct."""
    passes: tuple[tuple[NonNegative, ...], ...] = ()
    """Seconds by pass and rank."""


@dataclass(frozen=True)
class OverMpi:
    """Horovod's all-reduce bandwidth over MPI's."""

    backend: str
    bytes: Count
    ratio: float
    """Ratio of the fastest passes."""
    ratio_of_medians: float


@dataclass(frozen=True)
class Recommendation:
    """Recommended settings of Horovod for a network, with simulated seconds of a step."""

    network: str
    step_ms: float
    threshold: float
    """HOROVOD_FUSION_THRESHOLD, in bytes."""
    cycle_ms: float
    """HOROVOD_CYCLE_TIME, in milliseconds."""
    simulated_seconds: float
    simulated_seconds_by_default: float
    simulated_seconds_without_fusion: float
    latency: float
    """Seconds of a small message; `bandwidth` is in bytes per second."""
    bandwidth: float


@dataclass(frozen=True)
class Tuning:
    """Results of training with several settings of Horovod in turn."""

    settings: dict[str, dict[str, str]]
    """Environment variables of each setting, by name."""
    images_per_second: dict[str, tuple[float, ...]]
    """Rates of each setting in every round, by name."""
    ratios: dict[str, float]
    """Speed with the recommended setting over that with each other one."""


@dataclass(frozen=True, kw_only=True)
class CollectivesResult:
    """A result of `allstep collectives`."""

    FORMAT: ClassVar[str] = "allstep-collectives"
    VERSION: ClassVar[int] = 2

    ranks: Annotated[int, whole(2)]
    command: str
    time: str | None = None
    rounds: int | None = None
    load_average: tuple[float, ...] | None = None
    num_cores: int | None = None
    variables: dict[str, str]
    rows: tuple[Row, ...]
    missing: dict[str, tuple[str, ...]]
    """Collectives that each library does not have."""
    failures: dict[str, str]
    """Reason for each library that could not be measured."""
    horovod_over_mpi: tuple[OverMpi, ...] | None = None
    recommendation: Recommendation | None = None
    tuning: Tuning | None = None
