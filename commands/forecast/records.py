"""Results of `allstep forecast`: forecasts, alone or with the measurements that they are compared with."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from allstep.commands.forecast.control_plane import ControlPlane
from allstep.commands.forecast.forecast import Forecast
from allstep.commands.forecast.validation import Checked
from allstep.common.files.schema import list_of, mapping


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
