"""The few physical parameters of a forecast that no user knows, fitted to published measurements.

`python -m allstep.benchmarks.forecast_fit --write` fits them and writes fitted.yaml and the tables in docs/forecast.md.
"""

import functools
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from allstep.common.files.strict_json import Count, NonNegative, Positive, from_json

FITTED = Path(__file__).parent / "fitted.yaml"


@dataclass(frozen=True)
class Parameters:
    """Parameters of hardware and software."""

    crowding: float
    jitter: float
    nvlink: float
    pcie: float
    rdma: float
    tcp: float
    contention: float
    tcp_contention: float
    host_memory: float
    tail: float


@dataclass(frozen=True)
class Bounds:
    """Physical bounds of a parameter; the middle between them is expected where no measurement says more."""

    minimum: float
    maximum: float
    meaning: str

    @property
    def middle(self) -> float:
        return (self.minimum + self.maximum) / 2

    @property
    def spread(self) -> float:
        """Standard deviation that is expected between machines."""
        return (self.maximum - self.minimum) / 4


BOUNDS = {
    "crowding": Bounds(0.0, 0.12, "share by which a step is slower while all ranks of a host compute"),
    "jitter": Bounds(0.0, 0.03, "standard deviation of a rank's step time over its mean"),
    # A link carries headers; NCCL's kernels, few streams and root complexes that ranks share leave less.
    "nvlink": Bounds(0.1, 0.7, "share of NVLink's nominal bandwidth that an all-reduce reaches"),
    "pcie": Bounds(0.6, 1.0, "share of PCIe's bandwidth (80 Gbit/s for 3.0 x16)"),
    "rdma": Bounds(0.6, 0.95, "share of InfiniBand's or RoCE's nominal bandwidth between hosts"),
    "tcp": Bounds(0.3, 0.9, "share of Ethernet's nominal bandwidth that TCP reaches between hosts"),
    "contention": Bounds(0.0, 1.0, "share of its speed that computing loses while GPUs communicate"),
    "tcp_contention": Bounds(0.0, 1.0, "the same while hosts communicate by TCP"),
    # From one slow core with unpinned copies to a fast one: 1.3 GB/s were measured for MPI's part alone.
    "host_memory": Bounds(0.3, 1.5, "GB/s that a rank copies and reduces in host memory"),
    # No tail in a ResNet; embeddings are 10 % of BERT large, 22 % of BERT base and 31 % of GPT-2.
    "tail": Bounds(0.0, 0.4, "share of parameters in the last gradient of a network known by its size alone"),
}


@dataclass(frozen=True)
class FittedParameter:
    """A fitted value."""

    value: NonNegative
    low: NonNegative
    """Lower end of the interval of the value, from fits without each publication in turn (jackknife)."""
    high: NonNegative


@dataclass(frozen=True)
class Errors:
    """Deviations of publications that were not fitted; see `fitting.deviation`."""

    size: NonNegative
    """80 % of them are smaller. Each publication counts once, and the level is raised for their small number."""
    num_points: Count
    num_sources: Count


@dataclass(frozen=True)
class Reach:
    """Bandwidths and ranks fitted for one kind of link: outside of them, a forecast is less certain."""

    min_gbit: Positive
    max_gbit: Positive
    max_ranks: Count


@dataclass(frozen=True)
class Fitted:
    """Contents of fitted.yaml."""

    parameters: dict[str, FittedParameter]
    floor: Positive
    """Share of the baseline's step below which added time is not told apart."""
    errors: dict[str, Errors]
    """Errors by kind of link: inside, rdma, tcp; and `calibrated`, of forecasts from runs on the same machine."""
    reach: dict[str, Reach]
    """Reach by kind of link."""
    patterns: dict[str, Count]
    """Number of publications by pattern."""
    unseen: Positive
    """Factor by which errors are larger for a pattern that is in one publication only."""

    @property
    def values(self) -> Parameters:
        return Parameters(**{name: parameter.value for name, parameter in self.parameters.items()})


@functools.cache
def fitted() -> Fitted:
    """Read fitted.yaml."""
    found = from_json(Fitted, read_packaged(FITTED), FITTED.name)
    assert set(found.parameters) == {field.name for field in fields(Parameters)} == set(BOUNDS)
    return found


def read_packaged(path: Path) -> Any:
    """Return what a YAML file of this package contains; libyaml reads it several times faster where it is installed."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(path.read_text())
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()
