"""Least-squares fit of a forecast's parameters within their bounds, around values that are expected beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from allstep.commands.forecast.parameters import BOUNDS, Bounds, Parameters

_STEP = 0.01
"""Step of a numerical derivative, as a share of the bounds' distance: larger than the grain of a simulated step."""
_MAX_EVALUATIONS = 25


@dataclass(frozen=True)
class Prior:
    """Value expected beforehand, and its standard deviation."""

    value: float
    spread: float


def middles() -> dict[str, Prior]:
    """Return priors that say no more than the bounds."""
    return {name: Prior(bounds.middle, bounds.spread) for name, bounds in BOUNDS.items()}


def fit(
    errors: Callable[[Parameters], Sequence[float]],
    prior: Mapping[str, Prior],
    bounds: Mapping[str, Bounds] = BOUNDS,
) -> Parameters:
    """Return the most likely parameters.

    Args:
        errors: returns errors of forecasts over their standard deviations.
        prior: a parameter with a spread of 0 keeps its value.
    """
    import numpy as np
    from scipy.optimize import least_squares

    free = [name for name, expected in prior.items() if expected.spread > 0]
    fixed = {name: expected.value for name, expected in prior.items() if name not in free}
    low, width = (
        np.array(values)
        for values in zip(
            *((bounds[name].minimum, bounds[name].maximum - bounds[name].minimum) for name in free), strict=True
        )
    )
    expected = np.array([prior[name].value for name in free])
    spread = np.array([prior[name].spread for name in free])

    def parameters(shares: np.ndarray) -> Parameters:
        return Parameters(**fixed, **dict(zip(free, (low + width * shares).tolist(), strict=True)))

    def residuals(shares: np.ndarray) -> np.ndarray:
        return np.concatenate([errors(parameters(shares)), (low + width * shares - expected) / spread])

    start = np.clip((expected - low) / width, 0.01, 0.99)
    found = least_squares(residuals, start, bounds=(0, 1), diff_step=_STEP, max_nfev=_MAX_EVALUATIONS)
    return parameters(found.x)
