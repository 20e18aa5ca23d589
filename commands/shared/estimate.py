"""Statistics of a handful of samples: the median, the mean with its confidence interval, and the spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from allstep.common.files.records import Count, NonNegative, Positive

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """Statistics of samples of one quantity, in its unit."""

    num: Count
    """Number of samples."""
    median: Positive
    mean: Positive
    low: float
    """Lower end of the confidence interval of the mean; `low` and `high` are the mean of a single sample."""
    high: float
    stdev: NonNegative
    """Standard deviation of samples, with n - 1 degrees of freedom; 0 for a single sample."""
    min: float
    max: float


def estimate(samples: Sequence[float]) -> Estimate:
    """Return statistics of at least one sample.

    The interval is Student's (1908): mean +- t s / sqrt(n), with the quantile t of n - 1 degrees of freedom. It tells
    where the mean of many repetitions would be; where the next sample will be, the standard deviation tells.
    """
    num, mean = len(samples), statistics.fmean(samples)
    stdev = half = 0.0
    if num > 1:
        from scipy.special import stdtrit

        stdev = statistics.stdev(samples)
        half = float(stdtrit(num - 1, (1 + CONFIDENCE) / 2)) * stdev / math.sqrt(num)
    return Estimate(num, statistics.median(samples), mean, mean - half, mean + half, stdev, min(samples), max(samples))
