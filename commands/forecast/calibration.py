"""Calibration on a user's own runs: the parameters of a forecast that agree with them and with what is usual."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from allstep.commands.forecast.fitting import Prior, fit
from allstep.commands.forecast.parameters import BOUNDS, Bounds, Parameters

ERROR = 0.02
"""Standard deviation of a measured efficiency, with what the model leaves out."""
CPU_BOUNDS = {
    **BOUNDS,
    # Ranks that share cores, memory and the other load of a machine.
    "crowding": Bounds(0.0, 8.0, BOUNDS["crowding"].meaning),
    "jitter": Bounds(0.0, 0.4, BOUNDS["jitter"].meaning),
}


def calibrated(
    usual: Mapping[str, float],
    forecasts: Sequence[tuple[Callable[[Parameters], float], float]],
    *,
    known: Mapping[str, float] | None = None,
    bounds: Mapping[str, Bounds] = BOUNDS,
) -> Parameters:
    """Return parameters under which forecasts agree with measurements.

    Args:
        usual: values that are expected before anything is measured.
        forecasts: for each measured efficiency, its forecast as a function of the parameters, and the measured value.
        known: values that are not calibrated.
        bounds: CPU_BOUNDS for ranks that compute on CPUs.
    """
    prior = {name: Prior(value, bounds[name].spread) for name, value in usual.items()}
    prior |= {name: Prior(value, 0.0) for name, value in (known or {}).items()}

    def errors(parameters: Parameters) -> list[float]:
        return [(forecast(parameters) - measured) / ERROR for forecast, measured in forecasts]

    return fit(errors, prior, bounds)
