"""The optimizers of both frameworks, fed the same gradients. Oracle: torch.optim."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from allstep.common.config.train_config import OptimizerConfig
from allstep.common.schedule import Schedule, learning_rate
from allstep.pytorch.optimizers import build_optimizer as build_torch
from allstep.tensorflow.optimizers import build_optimizer as build_keras

NUM_STEPS = 50


def test_momentum_needs_no_correction_when_the_learning_rate_changes():
    """It falls to a tenth twice. Oracle: equation 10 and remark 2 of Goyal et al. 2017, the rate in the velocity."""
    import keras
    import tensorflow as tf

    schedule = Schedule(0.1, samples_per_epoch=NUM_STEPS, num_epochs=2, global_batch_size=1, reference_batch_size=1,
                        decay="step", milestones=(0.2, 0.5))  # fmt: skip
    config = OptimizerConfig(optimizer="sgd", momentum=0.9)
    weight, variable = torch.nn.Parameter(torch.zeros(1)), keras.Variable(np.zeros(1, np.float32))
    of_torch, of_keras = build_torch(config, [weight]), build_keras(config)
    of_keras.build([variable])
    corrected = uncorrected = velocity = plain_velocity = 0.0
    previous_rate = learning_rate(schedule, 0)
    for step, gradient in enumerate(np.random.default_rng(0).normal(size=NUM_STEPS).astype(np.float32)):
        rate = learning_rate(schedule, step)
        velocity = 0.9 * rate / previous_rate * velocity + rate * gradient
        plain_velocity = 0.9 * plain_velocity + rate * gradient
        corrected, uncorrected, previous_rate = corrected - velocity, uncorrected - plain_velocity, rate
        of_torch.param_groups[0]["lr"] = of_keras.learning_rate = rate
        weight.grad = torch.tensor([gradient])
        of_torch.step()
        of_keras.apply([tf.constant([gradient])], [variable])
    for received in (weight.item(), variable.numpy().item()):
        assert received == pytest.approx(corrected, rel=1e-5)
        assert received != pytest.approx(uncorrected, rel=1e-2)


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
