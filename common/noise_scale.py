"""The gradient noise scale: how large a batch still pays (McCandlish et al. 2018, "An Empirical Model of Large-Batch
Training").

A gradient over b samples has the square |G|^2 + tr(Sigma) / b in expectation, where G is the gradient of all samples
and Sigma the covariance of those of single ones. A step computes gradients of parts of its batch, one a rank, device
and pass, and their average, that of the whole batch: two sizes, from which appendix A.1 has unbiased estimates of both
terms. Each rank knows its own parts' alone; the estimates are linear in the squares, so a rank keeps its share of their
moving averages, and the shares are added up where somebody asks. Nothing more is sent in a step.

The noise scale is tr(Sigma) / |G|^2, in samples: at a batch of that size training takes twice the samples, and twice
the steps, of the least possible. Where batch norm sees each part by itself, gradients of parts are those of such a
network.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from allstep.common.config.train_config import TrainConfig
from allstep.common.data.sharding import rank_slice
from allstep.common.registry import STRATEGIES

MEASURED_EVERY = 4
"""Steps of which one is measured: what reading all gradients twice costs then is well below 1% of a step."""
_KEPT = 0.95
"""Of a moving average, in each measured step: 20 of them, which are 80 steps, count."""


@dataclass(frozen=True)
class NoiseScale:
    """This rank's share of the moving averages; their sums over ranks are the averages."""

    variance: float = 0.0
    """Of tr(Sigma), times 1 - 0.95^n after n measured steps."""
    square: float = 0.0
    """Of |G|^2, likewise: the factor cancels in the noise scale."""

    def after(
        self, squares_of_parts: float, square_of_average: float, num_samples: int, *, num_parts: Sequence[int]
    ) -> NoiseScale:
        """What follows a measured step.

        Args:
            squares_of_parts: see `common.worker.StepResult`.
            square_of_average: |gradient of the mean loss of the global batch|^2.
            num_samples: size of the global batch.
            num_parts: see `common.worker.Worker`.
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
    """tr(Sigma) / |G|^2 of sums over ranks; None where nothing was measured, or |G|^2 drowns in the noise."""
    return max(variance, 0.0) / square if square > 0 else None


def is_measured(step: int) -> bool:
    """Whether the step of that number, from 1, is measured."""
    return (step - 1) % MEASURED_EVERY == 0


def why_not_measured(config: TrainConfig, framework: str) -> str | None:
    """Why the flags of a run leave no noise scale to be measured, as the rest of a sentence; None where they do not."""
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
    """`num_parts` as `common.worker.Worker` has them: none where nothing is to be measured, or they are one part."""
    return num_parts if measures and math.prod(num_parts) > 1 else ()


@functools.cache
def part_sizes(num_samples: int, num_parts: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of the parts into which a batch is cut: as many as the first number says, each of these as the next."""
    if not num_parts:
        return (num_samples,)
    first, *others = num_parts
    bounds = [rank_slice(0, num_samples, rank=number, world_size=first) for number in range(first)]
    return tuple(size for begin, end in bounds for size in part_sizes(end - begin, tuple(others)))
