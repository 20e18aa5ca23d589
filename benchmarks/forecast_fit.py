"""Fit the defaults of `allstep forecast` to published measurements, and measure its errors on unseen publications.

    python -m allstep.benchmarks.forecast_fit [--write]

The parameters of commands/forecast/parameters.py are fitted to commands/forecast/published.yaml: every publication
counts once, and large errors count less (soft L1), since no physics here explains a misconfigured cluster. Errors are
those of fits that leave one publication out; so are the ranges that are tested on it. Calibration takes the two
smallest sizes of each system with three or more and forecasts the largest. `--write` writes
commands/forecast/fitted.yaml and the tables in docs/forecast.md. Takes some minutes on one core."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import yaml

from allstep.commands.forecast.allreduce import ring
from allstep.commands.forecast.fitting import calibrated, deviation, efficiency_range, fit, reach_factor
from allstep.commands.forecast.parameters import BOUNDS, FITTED, Errors, Fitted, FittedParameter, Parameters, Reach
from allstep.commands.forecast.site import KINDS
from allstep.commands.forecast.validation import Point, published_points
from allstep.common.base.flag_types import Parser
from allstep.common.files.strict_json import to_json
from allstep.common.process.exit import run_rank

ERROR = 0.07
"""Error of an efficiency beyond which it counts less."""
FLOOR = 0.03
"""Share of the baseline's step below which added time is not told apart; see commands/forecast/fitting.py."""
OUTSIDE = 0.2
"""Share of measurements outside of a range."""
ALWAYS = 0.9
"""Forecast of the baseline that always says the same."""
NOMINAL = Parameters(
    **{**dict.fromkeys(BOUNDS, 0.0), **dict.fromkeys(("nvlink", "pcie", "rdma", "tcp"), 0.9), "host_memory": 1.0}
)
"""Parameters of the baseline without overlap: 0.9 of the nominal bandwidth, and nothing else."""
PAGE = Path(__file__).parent.parent / "docs" / "forecast.md"
BEGIN, END = "<!-- tables of benchmarks/forecast_fit.py -->", "<!-- end of the tables -->"
LABELS = {"inside": "inside one host", "rdma": "several hosts, RDMA", "tcp": "several hosts, TCP"}


def without_overlap(point: Point) -> float:
    """Return the efficiency if a step were computing and then a ring at 0.9 of the nominal bandwidth."""
    system, site = point.system, point.system.site
    cluster = site.machine(NOMINAL).cluster
    num_bytes = (
        system.layers.num_parameters * (site.wire_bytes + 2 * site.gather_bytes) / (2 if site.gather_bytes else 1)
    )
    large, baseline = (ring(num_bytes, ranks, cluster) for ranks in (point.num_ranks, system.baseline_ranks))
    step = system.workload.step_seconds
    return step / (max(0.0, step - baseline) + large)


@dataclass(frozen=True)
class Unseen:
    """A published efficiency with a forecast to which it did not contribute."""

    point: Point
    forecast: float
    low: float = field(default=math.nan, kw_only=True)
    """Limits for `forecast`, from errors on the other publications."""
    high: float = field(default=math.nan, kw_only=True)

    @property
    def error(self) -> float:
        return self.forecast - self.point.measured

    @property
    def relative(self) -> float:
        """Deviation of the measurement from the forecast."""
        return deviation(self.point.measured, self.forecast, FLOOR)

    @property
    def is_within(self) -> bool:
        return self.low <= self.point.measured <= self.high

    @property
    def limits(self) -> str:
        return f"{self.low:.0%} to {self.high:.0%}{'' if self.is_within else ', missed'}"


UnseenT = TypeVar("UnseenT", bound=Unseen)


@dataclass(frozen=True)
class Judged(Unseen):
    """A published efficiency with the forecast of a fit without this publication."""

    default: float
    """Forecast as users get it."""


@dataclass(frozen=True)
class Calibrated(Unseen):
    """The largest size of a system, forecast from its two smallest ones."""

    sizes: tuple[int, ...]
    uncalibrated: float
    """Forecast without them."""

    @property
    def relative(self) -> float:
        """Deviation of the measurement from the forecast, over what the distance from the runs makes of it."""
        return super().relative / reach_factor(self.point.num_ranks, self.sizes[-1])


def fit_points(points: Sequence[Point]) -> Parameters:
    """Return the parameters that agree best with publications, each of which counts once."""
    sizes = Counter(point.publication for point in points)
    weights = np.array([1 / sizes[point.publication] for point in points])
    weights *= len(points) / weights.sum()

    def errors(parameters: Parameters) -> Sequence[float]:
        found = np.array([(point.forecast(parameters) - point.measured) / ERROR for point in points])
        return (np.sign(found) * np.sqrt(weights * 2 * (np.sqrt(1 + found**2) - 1))).tolist()

    return fit(errors, {name: bounds.middle for name, bounds in BOUNDS.items()})


def without_each(points: Sequence[Point]) -> dict[str, Parameters]:
    """Return the fit without each publication, by its name."""
    found = {}
    for name in sorted({point.publication for point in points}):
        found[name] = fit_points([point for point in points if point.publication != name])
        print(f"without {name:14} {' '.join(f'{value:.3f}' for value in vars(found[name]).values())}", flush=True)
    return found


def size_of(rows: Iterable[tuple[str, float]]) -> Errors:
    """Return the size that few deviations exceed, each of which comes with its publication's name.

    Each publication counts once. Of n publications, the next one lies beyond the level `a (n - 1) / (n + 1)` about as
    often as `a`.
    """
    names, values = zip(*sorted(((name, abs(value)) for name, value in rows), key=lambda row: row[1]), strict=True)
    sizes = Counter(names)
    weights = np.array([1 / sizes[name] for name in names])
    places = (np.cumsum(weights) - weights / 2) / weights.sum()
    level = OUTSIDE * (len(sizes) - 1) / (len(sizes) + 1)
    return Errors(round(float(np.interp(1 - level, places, values)), 3), len(values), len(sizes))


def describe_errors(
    judged: Sequence[Judged], largest: Sequence[Calibrated], parameters: dict[str, FittedParameter]
) -> Fitted:
    """Return the contents of fitted.yaml that follow from the errors on these rows."""
    sources: dict[str, set[str]] = defaultdict(set)
    for row in judged:
        sources[row.point.system.site.pattern].add(row.point.publication)
    patterns = {name: len(found) for name, found in sorted(sources.items())}
    seen = [row for row in judged if patterns[row.point.system.site.pattern] > 1]
    alone = [abs(row.relative) for row in judged if row not in seen]
    usual = statistics.median(abs(row.relative) for row in seen)
    errors, reach = {}, {}
    for kind in KINDS:
        rows = [row for row in seen if row.point.kind == kind]
        errors[kind] = size_of((row.point.publication, row.relative) for row in rows)
        gbits = [row.point.system.site.gbit(row.point.num_ranks) for row in rows]
        reach[kind] = Reach(min(gbits), max(gbits), max(row.point.num_ranks for row in rows))
    errors["calibrated"] = size_of((row.point.publication, row.relative) for row in largest)
    factor = max(1.0, statistics.median(alone) / usual) if alone else 1.0
    return Fitted(parameters, FLOOR, errors, reach, patterns, round(factor, 2))


def describe_parameters(values: Parameters, unseen: dict[str, Parameters]) -> dict[str, FittedParameter]:
    """Return each parameter with its 10 to 90 % interval, from the fits without one publication (jackknife)."""
    found = {}
    for name, bounds in BOUNDS.items():
        others, value = [getattr(one, name) for one in unseen.values()], getattr(values, name)
        mean, count = statistics.fmean(others), len(others)
        reach = 1.28 * math.sqrt((count - 1) / count * sum((other - mean) ** 2 for other in others))
        limits = (max(value - reach, bounds.minimum), min(value + reach, bounds.maximum))
        found[name] = FittedParameter(*(round(one, 4) for one in (value, *limits)))
    return found


def describe_others(
    judged: Sequence[Judged], largest: Sequence[Calibrated], parameters: dict[str, FittedParameter]
) -> dict[str, Fitted]:
    """Return what `describe_errors` returns without each publication, by its name."""
    return {
        name: describe_errors(
            [row for row in judged if row.point.publication != name],
            [row for row in largest if row.point.publication != name],
            parameters,
        )
        for name in {row.point.publication for row in judged}
    }


def with_range(row: UnseenT, others: Mapping[str, Fitted], calibrated_ranks: int = 0) -> UnseenT:
    """Return a row with the range that the errors of the other publications give."""
    point, system = row.point, row.point.system
    low, high = efficiency_range(
        row.forecast,
        system.site,
        point.num_ranks,
        others[point.publication],
        baseline_ranks=system.baseline_ranks,
        calibrated_ranks=calibrated_ranks,
    )
    return replace(row, low=low, high=high)


def calibrate(points: Sequence[Point], unseen: dict[str, Parameters]) -> list[Calibrated]:
    """Forecast the largest size of each system with three or more from the two smallest ones."""
    systems: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for point in points:
        systems[point.publication, point.name].append(point)
    found = []
    for (publication, _), rows in systems.items():
        if len(rows) > 2:
            *small, large = sorted(rows, key=lambda point: point.num_ranks)
            usual = vars(unseen[publication])
            parameters = calibrated(usual, [(point.forecast, point.measured) for point in small[:2]])
            sizes = tuple(point.num_ranks for point in small[:2])
            found.append(Calibrated(large, large.forecast(parameters), sizes, large.forecast(unseen[publication])))
    return found


def summary(errors: Sequence[float]) -> str:
    """Return cells of a table, in points: median, 90th percentile and largest size of errors, and their signed mean."""
    sizes = 100 * np.abs(errors)
    cells = f"{np.median(sizes):.1f} | {np.quantile(sizes, 0.9):.1f} | {sizes.max():.1f}"
    return f"{cells} | {100 * np.mean(errors):+.1f}"


def tables(judged: Sequence[Judged], found: Fitted, largest: Sequence[Calibrated]) -> str:
    """Return the tables of the page, in Markdown."""
    parts = (_parameters(found), _kinds(judged), _patterns(found, judged), _calibrations(largest), _rows(judged))
    return "\n\n".join(parts)


def _section(title: str, header: str, rows: Iterable[str], *, note: str = "") -> str:
    """Return a heading, a note if there is one, and a table; the cells of header and rows are separated by ` | `."""
    return "\n\n".join(filter(None, (f"### {title}", note, _table(header, rows))))


def _table(header: str, rows: Iterable[str]) -> str:
    return "\n".join([f"| {header} |", "| --- " * (header.count(" | ") + 1) + "|", *(f"| {row} |" for row in rows)])


def _parameters(found: Fitted) -> str:
    rows = []
    for name, bounds in BOUNDS.items():
        one = found.parameters[name]
        limits = f"{one.low:.3g} to {one.high:.3g} | {bounds.minimum:g} to {bounds.maximum:g}"
        rows.append(f"{name} | {one.value:.3g} | {limits} | {bounds.meaning}")
    return _section("Fitted parameters", "parameter | value | 10 to 90 % | bounds | meaning", rows)


def _kinds(judged: Sequence[Judged]) -> str:
    cells = []
    for kind in (None, *KINDS):
        rows = [row for row in judged if kind in (None, row.point.kind)]
        within = statistics.fmean(row.is_within for row in rows)
        label = f"{LABELS[kind] if kind else 'all'} ({len(rows)})"
        cells += [
            f"{label} | `allstep forecast` | {summary([row.error for row in rows])} | {within:.0%}",
            f"| always 90 % | {summary([ALWAYS - row.point.measured for row in rows])} |",
            f"| no overlap | {summary([without_overlap(row.point) - row.point.measured for row in rows])} |",
            f"| fitted to these rows, too | {summary([row.default - row.point.measured for row in rows])} |",
        ]
    header = "rows | forecast | median | 90 % | worst | signed mean | in the range"
    note = "Points of efficiency, each publication left out of the fit in turn."
    return _section("Errors by kind of link", header, cells, note=note)


def _patterns(found: Fitted, judged: Sequence[Judged]) -> str:
    rows = []
    for pattern, count in found.patterns.items():
        errors = [row.error for row in judged if row.point.system.site.pattern == pattern]
        rows.append(f"{pattern} | {count} | {len(errors)} | {summary(errors)}")
    header = "pattern | publications | rows | median | 90 % | worst | signed mean"
    return _section("Errors by pattern", header, rows)


def _calibrations(largest: Sequence[Calibrated]) -> str:
    rows = []
    for row in largest:
        cells = f"{row.point.measured:.1%} | {row.forecast:.1%} | {row.limits} | {row.uncalibrated:.1%}"
        rows.append(f"{row.point.name} | {row.sizes[0]}, {row.sizes[1]} | {row.point.num_ranks} | {cells}")
    header = "system | calibrated on | ranks | measured | calibrated | range | uncalibrated"
    within = statistics.fmean(row.is_within for row in largest)
    errors = [
        f"calibrated | {summary([row.error for row in largest])} | {within:.0%}",
        f"uncalibrated | {summary([row.uncalibrated - row.point.measured for row in largest])} |",
    ]
    table = _table("forecast | median | 90 % | worst | signed mean | in the range", errors)
    return f"{_section('Calibrated on the two smallest sizes', header, rows)}\n\n{table}"


def _rows(judged: Sequence[Judged]) -> str:
    rows = []
    for row in judged:
        point, baseline = row.point, row.point.system.baseline_ranks
        ranks = f"{point.num_ranks}/{baseline}" if baseline > 1 else f"{point.num_ranks}"
        cells = f"{point.measured:.1%} | {row.default:.1%} | {row.forecast:.1%} | {row.limits} | {100 * row.error:+.1f}"
        rows.append(f"{point.title} | {point.name} | {ranks} | {cells} | {without_overlap(point):.1%}")
    header = "publication | system | ranks | measured | forecast | unseen | range | error | no overlap"
    note = "`forecast` has the defaults as users get them, `unseen` those without this publication."
    return _section("Every row", header, rows, note=note)


def main(argv: Sequence[str] | None = None) -> None:
    """Fit, judge, and print the tables."""
    parser = Parser("python -m allstep.benchmarks.forecast_fit", __doc__)
    parser.add_argument("--write", action="store_true", help="write fitted.yaml and the tables of docs/forecast.md")
    flags = parser.parse_args(argv)
    points = published_points()
    values, unseen = fit_points(points), without_each(points)
    parameters = describe_parameters(values, unseen)
    usual = Parameters(**{name: one.value for name, one in parameters.items()})
    judged = [Judged(point, point.forecast(unseen[point.publication]), point.forecast(usual)) for point in points]
    largest = calibrate(points, unseen)
    found, others = describe_errors(judged, largest, parameters), describe_others(judged, largest, parameters)
    judged = [with_range(row, others) for row in judged]
    largest = [with_range(row, others, row.sizes[-1]) for row in largest]
    written = tables(judged, found, largest)
    print(f"\n{written}")
    if flags.write:
        note = "# Written by python -m allstep.benchmarks.forecast_fit --write.\n"
        FITTED.write_text(note + yaml.safe_dump(to_json(found), sort_keys=False))
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{written}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    run_rank(main)
