"""Gradient noise scale: how large a batch still pays off (McCandlish et al. 2018, "An Empirical Model of Large-Batch
Training").

The expected squared norm of a gradient over b samples is |G|^2 + tr(Sigma) / b, where G is the gradient over all
samples and Sigma the covariance of the gradients of single samples. A step computes gradients of parts of its batch
(one per rank, device and pass) and their average, the gradient of the whole batch. From these two batch sizes, appendix
A.1 derives unbiased estimates of both terms. A rank knows only the gradients of its parts. The estimates are linear in
the squares, so a rank keeps its share of their moving averages, and the shares are summed on demand. Steps send no
additional data.

The noise scale is tr(Sigma) / |G|^2, in samples: with a batch of that size, training takes twice the minimum number of
samples, and twice the minimum number of steps. If batch norm sees each part separately, so do these gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from allstep.common.catalog.strategies import STRATEGIES
from allstep.common.config.train_config import TrainConfig
from allstep.common.data.sharding import rank_slice

MEASURED_EVERY = 4
"""Interval of measured steps, at which reading all gradients twice costs well below 1% of the time."""
_KEPT = 0.95
"""Decay of the moving averages per measured step: they extend over about 20 measured steps, or 80 steps."""


@dataclass(frozen=True)
class NoiseScale:
    """This rank's share of the moving averages, which are the sums of the shares over ranks."""

    variance: float = 0.0
    """Share of the average of tr(Sigma), times 1 - 0.95^n after n measured steps."""
    square: float = 0.0
    """Share of the average of |G|^2, times the same factor, which cancels out in the noise scale."""

    def after(
        self, squares_of_parts: float, square_of_average: float, num_samples: int, *, num_parts: Sequence[int]
    ) -> NoiseScale:
        """Return the moving averages after a measured step.

        Args:
            squares_of_parts: see `common.training.worker.StepResult`.
            square_of_average: squared norm of the gradient of the global batch's mean loss.
            num_samples: size of the global batch.
            num_parts: see `common.training.worker.Worker`.
        """
        if not (math.isfinite(squares_of_parts) and math.isfinite(square_of_average)):
            return self  # squares overflow long before gradients do
        sizes = [size for size in part_sizes(num_samples, tuple(num_parts)) if size]
        if len(sizes) < 2:  # the last batch of an epoch may have fewer samples than there are parts
            return self
        # This rank's shares of the two mean squares, B_small and B_big in the paper.
        small_batch, big_batch = squares_of_parts / len(sizes), square_of_average / num_parts[0]
        variance = (small_batch - big_batch) / (np.mean([1 / size for size in sizes]) - 1 / num_samples)
        square = big_batch - variance / num_samples
        return NoiseScale(
            _KEPT * self.variance + (1 - _KEPT) * float(variance), _KEPT * self.square + (1 - _KEPT) * float(square)
        )


def noise_scale(variance: float, square: float) -> float | None:
    """Return tr(Sigma) / |G|^2 from sums over ranks; None if nothing was measured, or |G|^2 is lost in the noise."""
    return max(variance, 0.0) / square if square > 0 else None


def is_measured(step: int) -> bool:
    """Return whether the step with this number, from 1, is measured."""
    return (step - 1) % MEASURED_EVERY == 0


def why_not_measured(config: TrainConfig, framework: str) -> str | None:
    """Return the flag because of which a run cannot measure the noise scale, or None if it can."""
    if not STRATEGIES[framework][config.strategy_name].measures_noise:
        return f"--strategy {config.strategy_name}"
    if config.parallel.op != "average":
        return f"--op {config.parallel.op}"
    if config.parallel.slices is not None:
        return "--slices"
    if config.precision == "fp16":
        return "--precision fp16"
    if framework == "tensorflow" and config.parallel.compile:
        return "--compile in TensorFlow"
    return None


def parts_of(*num_parts: int, measures: bool) -> tuple[int, ...]:
    """Return `num_parts` for `common.training.worker.Worker`: empty if nothing is measured or there is one part."""
    return num_parts if measures and math.prod(num_parts) > 1 else ()


@functools.cache
def part_sizes(num_samples: int, num_parts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes of a batch's parts; it is cut into `num_parts[0]` parts, each of these by the next number."""
    if not num_parts:
        return (num_samples,)
    first, *others = num_parts
    bounds = [rank_slice(0, num_samples, rank=number, world_size=first) for number in range(first)]
    return tuple(size for begin, end in bounds for size in part_sizes(end - begin, tuple(others)))
