"""Least-squares fit of a forecast's parameters, and the range in which 80 % of other measurements lie.

A deviation is the logarithm of how much more time a measured step adds to the baseline's than the forecast one, both
with a floor. A range has the size that 80 % of deviations stay below in fits that leave one publication out, by kind of
link (fitted.yaml). It is the same upwards and downwards: the side of a few publications says nothing about the next
one's. It is wider where a link, a number of ranks or a pattern is far from what was fitted.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from allstep.commands.forecast.parameters import BOUNDS, Bounds, Fitted, Parameters
from allstep.commands.forecast.site import Site

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
    """Return the most likely parameters within their bounds, around values that are expected beforehand.

    `errors` returns errors of forecasts over their standard deviations, `usual` has the values that are expected
    beforehand, `known` those that stay as they are.
    """
    import numpy as np
    from scipy.optimize import least_squares

    fixed = known or {}
    free = [name for name in usual if name not in fixed]
    low = np.array([bounds[name].minimum for name in free])
    width = np.array([bounds[name].maximum for name in free]) - low
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


_PER_DOUBLING = 0.25
"""Share by which a range is wider for each doubling beyond what was fitted, or calibrated."""
_MAX_EFFICIENCY = 1.02
"""Highest limit: ranks compute no faster together than alone; measurements of both differ."""
_MIN_ADDED = 0.005
"""Least time that is taken as added, floor included, in baseline steps."""


def deviation(measured: float, forecast: float, floor: float) -> float:
    """Return how far a measured efficiency lies above a forecast one.

    `floor` is the share of the baseline's step that is added to the time that either adds.
    """
    return math.log(_added(forecast, floor) / _added(measured, floor))


def deviated(forecast: float, by: float, floor: float) -> float:
    """Return the efficiency whose deviation from a forecast one is `by`, as the inverse of `deviation`."""
    return 1 / (1 - floor + _added(forecast, floor) * math.exp(-by))


def _added(efficiency: float, floor: float) -> float:
    return max(_MIN_ADDED, 1 / efficiency - 1 + floor)


def efficiency_range(
    efficiency: float,
    site: Site,
    num_ranks: int,
    fitted: Fitted,
    *,
    baseline_ranks: int = 1,
    calibrated_ranks: int = 0,
    widening: float = 1.0,
) -> tuple[float, float]:
    """Return the 10 and 90 % limits of a forecast efficiency.

    Args:
        calibrated_ranks: largest number of ranks of the runs on which the forecast is calibrated; 0 without any. The
            range is then no wider than without them.
        widening: another factor for the width.
    """
    if num_ranks == baseline_ranks:
        return efficiency, efficiency
    size = fitted.errors[site.kind(num_ranks)].size * distance(site, num_ranks, fitted)
    if calibrated_ranks:
        size = min(size, fitted.errors["calibrated"].size * reach_factor(num_ranks, calibrated_ranks))
    lowest, highest = (deviated(efficiency, sign * widening * size, fitted.floor) for sign in (-1, 1))
    return min(efficiency, lowest), max(efficiency, min(_MAX_EFFICIENCY, highest))


def reach_factor(num_ranks: int, calibrated_ranks: int) -> float:
    """Return the factor by which a calibrated forecast is less certain on more ranks than its runs had."""
    return 1 + _PER_DOUBLING * max(0.0, math.log2(num_ranks / calibrated_ranks) - 1)


def distance(site: Site, num_ranks: int, fitted: Fitted) -> float:
    """Return the factor by which a forecast is less certain for being far from what was fitted; 1 if it is near."""
    reach, gbit = fitted.reach[site.kind(num_ranks)], site.gbit(num_ranks)
    doublings = (
        max(0.0, math.log2(num_ranks / reach.max_ranks))
        + max(0.0, math.log2(gbit / reach.max_gbit))
        + max(0.0, math.log2(reach.min_gbit / gbit))
    )
    is_seen = fitted.patterns.get(site.pattern, 0) > 1
    return (1 + _PER_DOUBLING * doublings) * (1.0 if is_seen else fitted.unseen)
