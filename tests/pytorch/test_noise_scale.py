"""Gradient norms that a step returns. Oracle: the gradient of each part of the batch, computed in float64."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from allstep.common.config.train_config import OptimizerConfig, StrategyConfig, TrainConfig
from allstep.common.data.datasets import Dataset
from allstep.common.data.loader import Batch
from allstep.common.data.sharding import Position, rank_slice
from allstep.common.launch.placement import ALONE
from allstep.common.recipe.noise_scale import is_measured
from allstep.pytorch.models import build_model
from allstep.pytorch.strategies.strategy import Single
from allstep.pytorch.worker import Worker

DATASET = Dataset(None, None, (8, 8, 1), 3, mean=(0.5,), std=(0.25,))


def square(network: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    gradients = torch.autograd.grad(cross_entropy(network(images), labels), list(network.parameters()))
    return float(sum(one.square().sum() for one in gradients))


@pytest.mark.parametrize("num_samples", [11, 2])
def test_squares_are_those_of_each_pass_and_of_the_whole_batch(num_samples):
    strategy = Single(ALONE, StrategyConfig())
    strategy.init()
    torch.manual_seed(0)
    network = build_model("cnn", (8, 8, 1), 3)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    config = TrainConfig(optimizer=OptimizerConfig(clip_norm=0.1), parallel=StrategyConfig(accumulate_steps=3))
    strategy.wrap(network, optimizer)
    worker = Worker(network, optimizer, config, strategy, torch.device("cpu"), DATASET, measures_noise=True)
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (num_samples, 8, 8, 1), np.uint8), np.arange(num_samples) % 3
    batch = Batch(images, labels, num_samples, num_samples, 1 / num_samples, Position(0, num_samples))
    for step in range(1, 6):
        before = copy.deepcopy(network).double()
        normalised = (torch.from_numpy(images).double().permute(0, 3, 1, 2) / 255 - 0.5) / 0.25
        result = worker.train_step(batch, 0.5)
        found = float(result.squares_of_parts), float(result.square_of_average)
        bounds = [rank_slice(0, num_samples, rank=number, world_size=3) for number in range(3)]
        parts = [square(before, normalised[slice(*at)], torch.from_numpy(labels[slice(*at)])) for at in bounds
                 if at[0] < at[1]]  # fmt: skip
        whole = square(before, normalised, torch.from_numpy(labels))
        assert found == (pytest.approx((sum(parts), whole), rel=1e-5) if is_measured(step) else (0, 0))
