"""What `allstep collectives` keeps, and what each of its ranks writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from allstep.common.files.records import Count, NonNegative, Positive
from allstep.common.files.schema import whole


@dataclass(frozen=True)
class RankRow:
    """One collective at one size, as a rank saw it."""

    collective: str
    bytes: Count
    right: bool
    """Whether the result was the expected one."""
    seconds: tuple[NonNegative, ...]
    """By pass."""


@dataclass(frozen=True)
class RankResult:
    """All that a rank of one library measured in one launch."""

    rows: tuple[RankRow, ...]
    missing: tuple[str, ...]
    """Collectives that the library does not have."""


@dataclass(frozen=True)
class OverRanks:
    """Seconds of a pass over ranks."""

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
    """Of the fastest pass."""
    median_seconds: NonNegative
    """The median over passes of the average over ranks."""
    algorithm_bandwidth: Positive
    """Bytes per second; both as nccl-tests define them."""
    bus_bandwidth: Positive
    right: bool
    """Whether every result on every rank was the expected one."""
    passes: tuple[tuple[NonNegative, ...], ...] = ()
    """Seconds by pass and rank."""


@dataclass(frozen=True)
class OverMpi:
    """Horovod's all-reduce bandwidth over MPI's."""

    backend: str
    bytes: Count
    ratio: float
    """Of the fastest passes."""
    ratio_of_medians: float


@dataclass(frozen=True)
class Recommendation:
    """Settings of Horovod for a network; of its steps, simulated seconds."""

    network: str
    step_ms: float
    threshold: float
    """Bytes; HOROVOD_FUSION_THRESHOLD."""
    cycle_ms: float
    """HOROVOD_CYCLE_TIME."""
    simulated_seconds: float
    simulated_seconds_by_default: float
    simulated_seconds_without_fusion: float
    latency: float
    """Seconds of a message of Horovod's, and below its bytes per second."""
    bandwidth: float


@dataclass(frozen=True)
class Tuning:
    """What training with several settings of Horovod in turn has shown."""

    settings: dict[str, dict[str, str]]
    """By name, the environment variables."""
    images_per_second: dict[str, tuple[float, ...]]
    """By name and round."""
    ratios: dict[str, float]
    """Of the recommended settings' speed to that of the others."""


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
    """By library, the collectives that it does not have."""
    failures: dict[str, str]
    """By library, why it could not be measured."""
    horovod_over_mpi: tuple[OverMpi, ...] | None = None
    recommendation: Recommendation | None = None
    tuning: Tuning | None = None
