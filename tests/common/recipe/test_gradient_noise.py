"""Gradient noise. Oracle: the formula of Neelakantan et al. 2015, equation 1, and the moments of a normal."""

from __future__ import annotations

import numpy as np
import pytest

from allstep.common.recipe.weights import gradient_noise


@pytest.mark.parametrize(("step", "variance"), [(0, 0.3), (1, 0.3 / 2**0.55), (999, 0.3 / 1000**0.55)])
def test_has_the_variance_of_the_paper(step, variance):
    noise = gradient_noise("fc1.weight", (1000, 100), eta=0.3, seed=0, step=step)
    assert noise.dtype == np.float32 and noise.shape == (1000, 100)
    assert noise.var(dtype=np.float64) == pytest.approx(variance, rel=0.02)
    assert abs(noise.mean(dtype=np.float64)) < 4 * (variance / noise.size) ** 0.5


def test_is_a_function_of_seed_step_and_name():
    def made(name: str = "a", *, seed: int = 0, step: int = 0) -> np.ndarray:
        return gradient_noise(name, (100,), eta=1.0, seed=seed, step=step) * (1 + step) ** 0.275

    assert np.array_equal(made(), made())
    others = made("b"), made(seed=1), made(step=1)
    assert all(abs(np.corrcoef(made(), other)[0, 1]) < 0.4 for other in others)
