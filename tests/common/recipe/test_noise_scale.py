"""The gradient noise scale. Oracles: the formulas of McCandlish et al. 2018, appendix A.1; gradients of known mean."""

from __future__ import annotations

import numpy as np
import pytest

from allstep.common.data.sharding import rank_slice
from allstep.common.recipe.noise_scale import MEASURED_EVERY, NoiseScale, is_measured, noise_scale, part_sizes, parts_of


def shares(gradients: np.ndarray, num_ranks: int, num_passes: int, before: list[NoiseScale]) -> list[NoiseScale]:
    """Return each rank's estimate after a step on these gradients of single samples, (samples, weights)."""
    num_samples = len(gradients)
    average_square = float(np.square(gradients.mean(0)).sum())
    after = []
    for rank in range(num_ranks):
        own = gradients[slice(*rank_slice(0, num_samples, rank=rank, world_size=num_ranks))]
        passes = [own[slice(*rank_slice(0, len(own), rank=n, world_size=num_passes))] for n in range(num_passes)]
        sum_of_squares = sum(float(np.square(part.mean(0)).sum()) for part in passes if len(part))
        num_parts = (num_ranks, num_passes)
        after.append(before[rank].after(sum_of_squares, average_square, num_samples, num_parts=num_parts))
    return after


def total(per_rank: list[NoiseScale]) -> tuple[float, float]:
    return sum(one.variance for one in per_rank), sum(one.square for one in per_rank)


def test_is_the_papers_formula():
    """Parts have one size: equations of A.1 with the mean over ranks of the squares, and their moving averages."""
    random, per_rank, averages = np.random.default_rng(1), [NoiseScale()] * 4, np.zeros(2)
    for _ in range(3):
        gradients = random.normal(0.3, 1.0, (32, 5))
        small = np.mean([np.square(part.mean(0)).sum() for part in np.split(gradients, 4)])
        big = np.square(gradients.mean(0)).sum()
        square = (32 * big - 8 * small) / (32 - 8)
        variance = (small - big) / (1 / 8 - 1 / 32)
        averages = 0.95 * averages + 0.05 * np.array([variance, square])
        per_rank = shares(gradients, 4, 1, per_rank)
    np.testing.assert_allclose(total(per_rank), averages, rtol=1e-12)
    assert noise_scale(*total(per_rank)) == pytest.approx(averages[0] / averages[1], rel=1e-12)


@pytest.mark.parametrize(("num_samples", "num_ranks", "num_passes"), [(7, 3, 1), (9, 2, 2), (2, 4, 1)])
def test_is_unbiased_where_parts_differ_in_size(num_samples, num_ranks, num_passes):
    """Gradients have a known mean, whose square is 4.5, and a known covariance, whose trace is 200."""
    random, estimates = np.random.default_rng(2), []
    for _ in range(2_000):
        gradients = random.normal(0.15, 1.0, (num_samples, 200))
        estimates.append(total(shares(gradients, num_ranks, num_passes, [NoiseScale()] * num_ranks)))
    variance, square = np.mean(estimates, axis=0) / 0.05
    assert variance == pytest.approx(200, rel=0.02)
    assert square == pytest.approx(4.5, abs=0.6)


def test_leaves_out_what_says_nothing():
    known = NoiseScale(3.0, 2.0)
    assert known.after(1.0, 1.0, 1, num_parts=(2,)) == known  # a single sample
    assert known.after(float("inf"), 1.0, 8, num_parts=(2,)) == known
    assert noise_scale(0.0, 0.0) is None and noise_scale(3.0, -1.0) is None
    assert noise_scale(-1.0, 2.0) == 0


def test_parts():
    assert part_sizes(7, (2, 1, 2)) == (1, 2, 2, 2)
    assert part_sizes(1, (3,)) == (0, 0, 1)
    assert parts_of(1, 2, measures=True) == (1, 2)
    assert parts_of(1, 1, measures=True) == parts_of(4, 2, measures=False) == ()
    assert [step for step in range(1, 10) if is_measured(step)] == [1, 1 + MEASURED_EVERY, 1 + 2 * MEASURED_EVERY]
