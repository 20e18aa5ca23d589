"""Changes of the averaged gradient in one process. Oracle: torch's clipping, and the noise of `common`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from allstep.common.config.train_config import StrategyConfig
from allstep.common.launch.placement import ALONE
from allstep.common.recipe.weights import gradient_noise
from allstep.pytorch.step import Clip, Noise
from allstep.pytorch.strategies.strategy import Single

SHAPES = {"fc.weight": (3, 4), "fc.bias": (3,)}


def parameters() -> dict[str, torch.nn.Parameter]:
    made = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    for number, parameter in enumerate(made.values()):
        parameter.grad = torch.arange(1.0, 1 + parameter.numel()).view_as(parameter) * (-1) ** number
    return made


def changed(step: int = 0, *, clip_norm: float, gradient_noise: float = 0.0) -> list[torch.Tensor]:
    own, strategy = parameters(), Single(ALONE, StrategyConfig())
    strategy.wrap(torch.nn.ParameterList(own.values()), torch.optim.SGD(own.values()))
    Clip(clip_norm, list(own.values()), strategy)(step)
    if gradient_noise:
        Noise(gradient_noise, own, 7, strategy)(step)
    return [parameter.grad for parameter in own.values()]


@pytest.mark.parametrize("maximum", [0.5, 25.7, 1e4])
def test_clips_as_torch_does(maximum):
    expected = parameters()
    torch.nn.utils.clip_grad_norm_(expected.values(), maximum)
    for received, parameter in zip(changed(clip_norm=maximum), expected.values(), strict=True):
        torch.testing.assert_close(received, parameter.grad, rtol=1e-6, atol=0)


def test_noise_is_added_to_what_is_clipped():
    flags = {"clip_norm": 0.5, "gradient_noise": 0.1}
    for name, noisy, clipped in zip(SHAPES, changed(step=3, **flags), changed(clip_norm=0.5), strict=True):
        expected = gradient_noise(name, SHAPES[name], eta=0.1, seed=7, step=3)
        np.testing.assert_allclose((noisy - clipped).numpy(), expected, atol=1e-6)
