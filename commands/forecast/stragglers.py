"""Time of the slowest of many ranks, for which all ranks wait in every step."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence

_NUM_POINTS = 2000
_REACH = 9.0  # standard deviations; the largest of 100,000 is at 4.4


@functools.cache
def expected_largest(number: int) -> float:
    """Return the expected largest of `number` independent standard normal values: 0 for 1, 1.42 for 8, 3.04 for 512.

    It is the mean of the distribution function F(x)^n: the integral of 1 - F^n above 0 minus that of F^n below (David
    and Nagaraja 2003, Order Statistics, section 3.1).
    """
    if number == 1:
        return 0.0
    width = _REACH / _NUM_POINTS
    points = [(i + 0.5) * width for i in range(_NUM_POINTS)]
    below = statistics.NormalDist().cdf
    return width * math.fsum((1 - below(x) ** number) - below(-x) ** number for x in points)


def slowdown(num_ranks: int, jitter: float) -> float:
    """Return the expected time of the slowest of `num_ranks`, in units of the mean time.

    Args:
        jitter: standard deviation of a rank's step time over its mean.
    """
    return 1 + jitter * expected_largest(num_ranks)


def jitter_of(seconds: Sequence[float]) -> float:
    """Return standard deviation over mean of at least two measured step times of one rank."""
    return statistics.stdev(seconds) / statistics.fmean(seconds)
