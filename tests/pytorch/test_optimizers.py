"""The optimizers as one kernel, which GPUs have them be; a CPU has the same kernels. Oracle: the same unfused."""

from __future__ import annotations

import pytest
import torch

from allstep.common.config.train_config import OptimizerConfig
from allstep.pytorch.optimizers import build_optimizer

NUM_STEPS = 50


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", ["sgd", "nesterov", "adam", "adamw"])
def test_fused_updates_are_the_same(name, weight_decay):
    config = OptimizerConfig(optimizer=name, weight_decay=weight_decay)
    random = torch.Generator().manual_seed(0)
    start = torch.randn(7, 5, generator=random)
    weights = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    optimizers = [
        build_optimizer(config, [weight], fused=fused) for weight, fused in zip(weights, (False, True), strict=True)
    ]
    for step in range(NUM_STEPS):
        gradient = torch.randn(7, 5, generator=random)
        for weight, optimizer in zip(weights, optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = 0.05 / (1 + step)
            weight.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(weights[1], weights[0], rtol=2e-6, atol=1e-6)
    assert [optimizer.param_groups[0]["fused"] for optimizer in optimizers] == [None, True]
