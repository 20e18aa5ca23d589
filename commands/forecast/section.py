"""Results of `allstep forecast`, the sections of a report about them, and the tables on the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from allstep.commands.forecast.causes import NOTICED
from allstep.commands.forecast.control_plane import ControlPlane
from allstep.commands.forecast.forecast import Forecast
from allstep.commands.forecast.validation import Checked
from allstep.commands.shared.page.document import NOTHING, Section, Table, amount, share
from allstep.commands.shared.page.figures import Line, lines
from allstep.common.files.strict_json import list_of, mapping


@dataclass(frozen=True)
class ForecastRow(Forecast):
    """A forecast with its bottleneck."""

    bottleneck: str
    """Name of what costs most."""
    bottleneck_share: float
    """Share of the bottleneck in the step time."""
    helps: tuple[str, float] | None
    """The change that gains most, and the efficiency with it."""
    seconds_to_accuracy: float | None
    control_plane: ControlPlane | None = None
    """Cost of messages other than gradients; None in older results, and if a job has none."""
    low: float | None = None
    """10 % limit of the efficiency; None in older results."""
    high: float | None = None
    """90 % limit of the efficiency."""


@dataclass(frozen=True)
class ForecastsResult:
    """A result of `allstep forecast --output`."""

    FORMAT: ClassVar[str] = "allstep-forecast"
    FORMER_FORMATS: ClassVar[tuple[str, ...]] = ("allstep-predict",)
    VERSION: ClassVar[int] = 1

    command: str
    forecasts: Annotated[tuple[ForecastRow, ...], list_of(mapping, minimum=1)]


@dataclass(frozen=True)
class ValidationResult:
    """A result of `allstep forecast --validate --output`."""

    FORMAT: ClassVar[str] = "allstep-validation"
    VERSION: ClassVar[int] = 1

    command: str
    largest_error: float
    """Largest allowed error of an efficiency."""
    rows: tuple[Checked, ...]
    notes: tuple[str, ...]


def table_of(rows: Sequence[ForecastRow]) -> Table:
    """Return the table of forecasts."""
    header = ["ranks", "step ms", "closed ms", "efficiency", "10-90%", "samples/s", "to accuracy", "costs most"]
    cells = [
        [
            *(f"{row.num_ranks:,}", amount(1000 * row.total), amount(1000 * row.closed_form), share(row.efficiency)),
            *(_range(row.low, row.high), amount(row.images_per_second), _duration(row.seconds_to_accuracy)),
            f"{row.bottleneck} {share(row.bottleneck_share)}" if row.bottleneck_share else row.bottleneck,
            f"{row.helps[0]}: {share(row.helps[1])}" if row.helps else NOTHING,
        ]
        for row in rows
    ]
    return Table("", [*header, "helps most"], cells)


def control_table(rows: Sequence[ForecastRow]) -> Table:
    """Return the table of the control planes that cost more than NOTICED."""
    cells = []
    for row in rows:
        if (control := row.control_plane) and control.share > NOTICED:
            of_step = f"{share(control.replica_check_share)}, " if control.replica_check_share else ""
            checked = f"{of_step}{control.replica_check:.2g} s an epoch"
            seconds = f"{control.stop:.1f} s", f"{control.broadcast:.2g} s"
            cells.append(
                [f"{row.num_ranks:,}", share(control.beats), checked, *seconds, f"{control.num_connections:,}"]
            )
    caption = "Control plane: upper limit of what is added to a step, if rank 0 has no core to spare; in the efficiency"
    return Table(caption, ["ranks", "beats", "replica check", "stop agreed", "state sent", "connections"], cells)


def checked_table(rows: Sequence[Checked]) -> Table:
    """Return the table of measured efficiencies and their forecasts."""
    cells = [
        [
            *(row.title, row.system, row.network),
            f"{row.num_ranks}" + (f" over {row.baseline_ranks}" if row.baseline_ranks > 1 else ""),
            *(share(row.measured), share(row.forecast), _range(row.low, row.high), f"{100 * row.error:+.1f}"),
            "yes" if row.within else "NO",
        ]
        for row in rows
    ]
    header = ["measured by", "", "network", "ranks", "measured", "forecast", "10-90%", "points", "within"]
    return Table("Efficiency", header, cells)


def _range(low: float | None, high: float | None) -> str:
    return NOTHING if low is None or high is None else f"{share(low)} to {share(high)}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


def forecast(result: ForecastsResult) -> Section:
    """Return the section of a result of `allstep forecast --output`."""
    rows = result.forecasts
    ranks, efficiencies = [row.num_ranks for row in rows], [row.efficiency for row in rows]
    limits = [(row.low, row.high) for row in rows if row.low is not None and row.high is not None]
    low, high = zip(*limits, strict=True) if len(limits) == len(rows) else ((), ())  # older results have none
    curves = [
        Line("forecast", ranks, efficiencies, low, high, is_band=bool(low)),
        Line("ideal", ranks, [1.0] * len(ranks), reference=True),
    ]
    caption = "Forecast efficiency, with its range from 10 to 90 %"
    figure = lines(caption, curves, x_label="ranks", y_label="", x_scale="log10", percent=True)
    return Section("Forecast", figures=[figure], tables=[table_of(rows)], commands=[result.command])


def validation(result: ValidationResult) -> Section:
    """Return the section of a result of `allstep forecast --validate --output`, with a list of missed rows."""
    rows, bound = result.rows, 100 * result.largest_error
    missed = [row for row in rows if not row.within]
    verdict = (
        f"{len(rows) - len(missed)} of {len(rows)} efficiencies lie in the 10 to 90 % range of their forecast or, "
        f"where it has none, within {bound:g} points of it."
    )
    section = Section("Forecasts and measurements", text=[verdict, *result.notes], commands=[result.command])
    section.items = [
        f"MISSED by {100 * abs(row.error):.1f} points: {row.title}, {row.system}, {row.network} on "
        f"{row.num_ranks} ranks"
        for row in missed
    ]
    section.tables.append(checked_table(rows))
    return section
