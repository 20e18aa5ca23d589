"""The range of a forecast: between which efficiencies 80 % of the measurements lie that nobody fitted to.

An error is in proportion to its scale: the share of a step that is forecast to be lost, plus a floor. The 10 and 90 %
quantiles of that proportion come from fits that leave one publication out, by kind of link (fitted.yaml). They are
widened where a link, a number of ranks or a pattern is far from what was fitted.
"""

from __future__ import annotations

import math

from allstep.commands.forecast.parameters import Fitted
from allstep.commands.forecast.site import Site

_PER_DOUBLING = 0.25
"""Share by which a range is wider for each doubling beyond what was fitted, or calibrated."""


def scale(efficiency: float, floor: float) -> float:
    """Return the scale of a forecast's error."""
    return max(0.0, 1 - efficiency) + floor


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
        calibrated_ranks: largest number of ranks of the runs on which the forecast is calibrated; 0 without any.
        widening: another factor for the width.
    """
    if num_ranks == baseline_ranks:
        return efficiency, efficiency
    if calibrated_ranks:
        errors = fitted.errors["calibrated"]
        widening *= 1 + _PER_DOUBLING * max(0.0, math.log2(num_ranks / calibrated_ranks) - 1)
    else:
        errors = fitted.errors[site.kind(num_ranks)]
        widening *= distance(site, num_ranks, fitted)
    width = widening * scale(efficiency, fitted.floor)
    return max(0.0, efficiency + errors.low * width), efficiency + errors.high * width


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
