"""Forecasts compared with published measurements and our own.

published.yaml has publications by name: what its authors measured, with what a user would have known before.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from allstep.commands.forecast.fitting import efficiency_range
from allstep.commands.forecast.forecast import Workload, forecast
from allstep.commands.forecast.networks import Network, known_networks, uniform
from allstep.commands.forecast.parameters import Parameters, fitted, read_packaged
from allstep.commands.forecast.site import Site
from allstep.common.files.strict_json import Count, Mismatch, Positive, from_json

PUBLISHED = Path(__file__).parent / "published.yaml"
LARGEST_ERROR = 0.05
"""Largest error of a forecast of our own runs, which has no range."""
MIN_COVERAGE = 0.75
"""Smallest share of published measurements in their ranges, which are made for 0.8."""


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
    estimated: str = ""
    """The parameter that was estimated from this row, in older results."""
    low: float | None = None
    """10 % limit of the forecast; None without a range."""
    high: float | None = None
    link: str = ""
    """Kind of link that decides the forecast."""

    @property
    def error(self) -> float:
        return self.forecast - self.measured

    @property
    def within(self) -> bool:
        """Whether the measurement is in the range, or within 5 points of a forecast that has none."""
        if self.low is None or self.high is None:
            return abs(self.error) <= LARGEST_ERROR
        return self.low <= self.measured <= self.high


@dataclass(frozen=True)
class System:
    """Measurements of one publication with one network on one kind of machine."""

    source: str
    network: str
    """A known network, or a number of parameters in equal layers."""
    batch_size: Count
    site: Site
    efficiency: dict[str, Positive]
    """Efficiency by number of ranks."""
    step_seconds: Positive | None = None
    """Step time of the baseline; either this or `images_per_second` of each of its ranks is given."""
    images_per_second: Positive | None = None
    baseline_ranks: Count = 1
    assumed: str = ""
    """Parameters that the source lacks."""

    @property
    def workload(self) -> Workload:
        """Workload without jitter."""
        seconds = self.step_seconds or self.batch_size / (self.images_per_second or 1)
        return Workload(self.layers, self.batch_size, seconds, baseline_ranks=self.baseline_ranks)

    @property
    def layers(self) -> Network:
        if self.network.isdecimal():
            return uniform(int(self.network))
        return known_networks()[self.network]


@dataclass(frozen=True)
class Published:
    """A publication."""

    title: str
    sources: dict[str, str]
    systems: dict[str, System]


@dataclass(frozen=True)
class Point:
    """One published efficiency."""

    publication: str
    """Name in the file: a fit leaves out whole publications."""
    title: str
    name: str
    system: System
    num_ranks: int
    measured: float

    @property
    def kind(self) -> str:
        return self.system.site.kind(self.num_ranks)

    def forecast(self, parameters: Parameters) -> float:
        """Return the efficiency that is forecast with these parameters."""
        workload = self.system.workload.assuming(parameters)
        return forecast(workload, self.system.site.machine(parameters), self.num_ranks).efficiency


@functools.cache
def published_points() -> tuple[Point, ...]:
    """Return all published efficiencies."""
    return tuple(point for name, found in read_packaged(PUBLISHED).items() for point in read_publication(name, found))


def read_publication(publication: str, found: Any) -> list[Point]:
    """Return the efficiencies of a publication, from what the file has under its name."""
    table = from_json(Published, found, publication)
    for name, system in table.systems.items():
        if system.source not in table.sources:
            raise Mismatch(f"expected one of {table.title}'s sources for {name}, received {system.source}")
        if (system.step_seconds is None) == (system.images_per_second is None):
            raise Mismatch(f"expected step_seconds or images_per_second for {name}")
    return [
        Point(publication, table.title, name, system, int(ranks), efficiency)
        for name, system in table.systems.items()
        for ranks, efficiency in system.efficiency.items()
    ]


def check(point: Point) -> Checked:
    """Forecast a published efficiency with the defaults."""
    found = fitted()
    efficiency = point.forecast(found.values)
    baseline = point.system.baseline_ranks
    low, high = efficiency_range(efficiency, point.system.site, point.num_ranks, found, baseline_ranks=baseline)
    measured = (point.title, point.name, point.system.network, point.num_ranks, baseline, point.measured)
    return Checked(*measured, efficiency, low=low, high=high, link=point.kind)
