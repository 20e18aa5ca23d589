"""The optimizers of both frameworks, fed the same gradients. Oracle: torch.optim."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from allstep.common.config import OptimizerConfig
from allstep.pytorch.optimizers import build_optimizer as build_torch
from allstep.tensorflow.optimizers import build_optimizer as build_keras

NUM_STEPS = 50


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("name", "momentum"), [("sgd", 0.0), ("sgd", 0.9), ("nesterov", 0.9), ("adam", 0.0), ("adamw", 0.0)]
)
def test_same_updates_as_torch(name, momentum, weight_decay):
    """Gradients of size 1 and a learning rate that changes: nothing here is made of rounding errors, as it is in
    training, where Adam blows up differences of gradients that should be 0."""
    import keras

    import tensorflow as tf

    config = OptimizerConfig(optimizer=name, momentum=momentum, weight_decay=weight_decay)
    random = np.random.default_rng(0)
    start = random.normal(size=(7, 5)).astype(np.float32)
    weight, variable = torch.nn.Parameter(torch.from_numpy(start.copy())), keras.Variable(start)
    of_torch, of_keras = build_torch(config, [weight]), build_keras(config)
    of_keras.build([variable])
    for step in range(NUM_STEPS):
        gradient = random.normal(size=start.shape).astype(np.float32)
        rate = 0.05 / (1 + step)
        of_torch.param_groups[0]["lr"] = rate
        of_keras.learning_rate = rate
        weight.grad = torch.from_numpy(gradient)
        of_torch.step()
        of_keras.apply([tf.constant(gradient)], [variable])
        np.testing.assert_allclose(variable.numpy(), weight.detach().numpy(), rtol=2e-6, atol=1e-6, err_msg=f"{step}")
