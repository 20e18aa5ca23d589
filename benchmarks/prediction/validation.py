"""Forecasts beside what others and we have measured.

A table is a YAML file as in published/: systems with physical parameters, each with where it is known from, and rows.
`estimated` marks a row from which a parameter was estimated, so that its own error says little.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allstep.benchmarks.prediction.forecast import Machine, Workload, forecast
from allstep.benchmarks.prediction.links import Cluster, Link
from allstep.benchmarks.prediction.networks import known_networks
from allstep.benchmarks.prediction.simulation import Fusion
from allstep.common.process.errors import UserError

PUBLISHED = Path(__file__).parent / "published"
LARGEST_ERROR = 0.05


@dataclass(frozen=True)
class Checked:
    """A measured efficiency and what was forecast for it."""

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


def check(path: Path) -> list[Checked]:
    """Forecast each row of a table.

    Raises:
        UserError: the file is no such table.
    """
    import yaml

    try:
        table = yaml.safe_load(path.read_text())
        machines = {name: machine(system) for name, system in table["systems"].items()}
        return [_checked(table, row, machines[row["system"]]) for row in table["rows"]]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(f"{type(error).__name__} {error}".split())
        raise UserError(f"expected a table as in {PUBLISHED}, received {path}: {reason}") from None


def machine(system: dict[str, Any]) -> Machine:
    """The machine that a table's system describes."""
    rest = dict(system)
    cluster = Cluster(rest.pop("ranks_per_node"), *(Link(**rest.pop(name)) for name in ("intra", "inter")))
    rest.pop("jitter", None)  # the ranks', not the machine's
    return Machine(cluster, **{**rest, "fusion": Fusion(**rest.get("fusion", {}))})


def _checked(table: dict[str, Any], row: dict[str, Any], on: Machine) -> Checked:
    if row["source"] not in table["sources"]:
        raise ValueError(f"no source {row['source']}")
    step_seconds = row["step_seconds"] if "step_seconds" in row else row["batch_size"] / row["images_per_second"]
    workload = Workload(
        known_networks()[row["network"]],
        row["batch_size"],
        step_seconds,
        jitter=table["systems"][row["system"]].get("jitter", 0.0),
        **({"backward_share": row["backward_share"]} if "backward_share" in row else {}),
    )
    baseline_ranks = row.get("baseline_ranks", 1)
    baseline = forecast(workload, on, baseline_ranks)
    return Checked(
        table["title"],
        row["system"],
        row["network"],
        row["ranks"],
        baseline_ranks,
        row["efficiency"],
        baseline.total / forecast(workload, on, row["ranks"]).total,
        row.get("estimated", ""),
    )
