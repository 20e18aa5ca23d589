"""Least-squares fit of a forecast's parameters within their bounds, around values that are expected beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from allstep.commands.forecast.parameters import BOUNDS, Bounds, Parameters

_STEP = 0.01
"""Step of a numerical derivative, as a share of the bounds' distance: larger than the grain of a simulated step."""
_MAX_EVALUATIONS = 25


def fit(
    errors: Callable[[Parameters], Sequence[float]],
    usual: Mapping[str, float],
    *,
    known: Mapping[str, float] | None = None,
    bounds: Mapping[str, Bounds] = BOUNDS,
) -> Parameters:
    """Return the most likely parameters.

    `errors` returns errors of forecasts over their standard deviations, `usual` has the values that are expected
    beforehand, `known` those that stay as they are.
    """
    import numpy as np
    from scipy.optimize import least_squares

    fixed = known or {}
    free = [name for name in usual if name not in fixed]
    low, width = (
        np.array(values)
        for values in zip(
            *((bounds[name].minimum, bounds[name].maximum - bounds[name].minimum) for name in free), strict=True
        )
    )
    expected = np.array([usual[name] for name in free])
    spread = np.array([bounds[name].spread for name in free])

    def parameters(shares: np.ndarray) -> Parameters:
        return Parameters(**fixed, **dict(zip(free, (low + width * shares).tolist(), strict=True)))

    def residuals(shares: np.ndarray) -> np.ndarray:
        return np.concatenate([errors(parameters(shares)), (low + width * shares - expected) / spread])

    start = np.clip((expected - low) / width, 0.01, 0.99)
    found = least_squares(residuals, start, bounds=(0, 1), diff_step=_STEP, max_nfev=_MAX_EVALUATIONS)
    return parameters(found.x)


# Calibration on a user's own runs: the parameters of a forecast that agree with them and with what is usual.
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

    def errors(parameters: Parameters) -> list[float]:
        return [(forecast(parameters) - measured) / ERROR for forecast, measured in forecasts]

    return fit(errors, usual, known=known, bounds=bounds)
