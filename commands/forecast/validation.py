"""Forecasts compared with published measurements and our own.

A table is a YAML file as in published/: systems with physical parameters and their sources, and rows. `estimated` marks
a row from which a parameter was estimated, so that its error means little.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from allstep.commands.forecast.allreduce import ALGORITHMS
from allstep.commands.forecast.forecast import Machine, Workload, forecast
from allstep.commands.forecast.links import Cluster, Link
from allstep.commands.forecast.networks import known_networks
from allstep.commands.forecast.simulation import Fusion
from allstep.common.files.records import Count, NonNegative, Positive, from_json
from allstep.common.files.schema import Mismatch, one_of

PUBLISHED = Path(__file__).parent / "published"
LARGEST_ERROR = 0.05


@dataclass(frozen=True)
class Checked:
    """A measured efficiency and its forecast."""

    DERIVED: ClassVar[tuple[str, ...]] = ("error", "within")

    title: str
    system: str
    network: str
    num_ranks: int
    baseline_ranks: int
    measured: float
    forecast: float
    estimated: str
    """The parameter that was estimated from this row; empty for a true forecast."""

    @property
    def error(self) -> float:
        return self.forecast - self.measured

    @property
    def within(self) -> bool:
        return abs(self.error) <= LARGEST_ERROR


@dataclass(frozen=True)
class System:
    """A machine in a table."""

    ranks_per_node: Count
    intra: Link
    inter: Link
    algorithm: Annotated[str, one_of(*ALGORITHMS)] = "ring"
    fusion: Fusion = Fusion()
    contention: NonNegative = 0.0
    jitter: NonNegative = 0.0
    """Deviation over mean of a rank's step times."""

    @property
    def machine(self) -> Machine:
        cluster = Cluster(self.ranks_per_node, self.intra, self.inter)
        return Machine(cluster, self.algorithm, self.fusion, contention=self.contention)


@dataclass(frozen=True)
class Row:
    """An efficiency in a table."""

    source: str
    system: str
    network: str
    batch_size: Count
    ranks: Count
    efficiency: Positive
    step_seconds: Positive | None = None
    """Step time of one rank; either this or `images_per_second` is given."""
    images_per_second: Positive | None = None
    backward_share: float = Workload.backward_share
    baseline_ranks: Count = 1
    estimated: str = ""

    @property
    def rank_step_seconds(self) -> float:
        """Step time of one rank, computed from `images_per_second` if not given."""
        if self.step_seconds is not None:
            return self.step_seconds
        if self.images_per_second is None:
            raise Mismatch(f"expected step_seconds or images_per_second for {self.network}, received neither")
        return self.batch_size / self.images_per_second


@dataclass(frozen=True)
class Published:
    """A published table."""

    title: str
    sources: dict[str, str]
    systems: dict[str, System]
    rows: tuple[Row, ...]


def check(path: Path) -> list[Checked]:
    """Forecast each row of a table."""
    import yaml

    table = from_json(Published, yaml.safe_load(path.read_text()), path.name)
    return [_checked(table, row) for row in table.rows]


def _checked(table: Published, row: Row) -> Checked:
    if row.source not in table.sources:
        raise Mismatch(f"expected one of {table.title}'s sources, received {row.source}")
    system = table.systems[row.system]
    network = known_networks()[row.network]
    workload = Workload(network, row.batch_size, row.rank_step_seconds, row.backward_share, jitter=system.jitter)
    baseline, large = (forecast(workload, system.machine, ranks) for ranks in (row.baseline_ranks, row.ranks))
    return Checked(
        table.title,
        row.system,
        row.network,
        row.ranks,
        row.baseline_ranks,
        row.efficiency,
        baseline.total / large.total,
        row.estimated,
    )
