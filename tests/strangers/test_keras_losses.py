"""Losses that Keras layers add themselves are trained. Oracle: `fit` of plain Keras with the whole batch."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
from keras import layers
from ranks import BIN, REPOSITORY, run

from allstep.tensorflow import Session

NUM_SAMPLES, EPOCHS, RATE = 24, 4, 0.05
INPUTS = np.random.default_rng(0).standard_normal((NUM_SAMPLES, 5)).astype(np.float32)
TARGETS = np.arange(NUM_SAMPLES) % 3


class Penalty(layers.Layer):
    """Adds the mean square of its inputs to the loss."""

    def call(self, inputs):
        self.add_loss(0.3 * keras.ops.mean(keras.ops.square(inputs)))
        return inputs


def build(kind: str) -> keras.Model:
    keras.utils.set_random_seed(1)
    options = {
        "kernel": {"kernel_regularizer": keras.regularizers.L2(0.2)},
        "bias": {"bias_regularizer": keras.regularizers.L1(0.1)},
        "activity": {"activity_regularizer": keras.regularizers.L2(0.02)},
    }.get(kind, {})
    added = [Penalty()] if kind == "add_loss" else []
    return keras.Sequential(
        [layers.Input((5,)), layers.Dense(7, activation="tanh", **options, name="hidden"), *added, layers.Dense(3)]
    )


@functools.cache
def weights_by_keras(kind):
    model, loss = build(kind), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(RATE), loss=loss, run_eagerly=True)
    model.fit(INPUTS, TARGETS, batch_size=NUM_SAMPLES, epochs=EPOCHS, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize("kind", ["kernel", "bias", "activity", "add_loss"])
@pytest.mark.parametrize("flags", [{}, {"accumulate_steps": 3}], ids=["plain", "passes"])
def test_losses_of_layers_are_part_of_the_loss(kind, flags):
    expected, plain, trained = weights_by_keras(kind), weights_by_keras("none"), build(kind)
    options = {"optimizer": "sgd", "momentum": 0.0, "base_lr": RATE}
    data = INPUTS, TARGETS
    Session(trained, data, data, epochs=EPOCHS, global_batch_size=NUM_SAMPLES, **options, **flags).fit()
    for one, other in zip(trained.get_weights(), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
    assert not np.allclose(trained.get_weights()[0], plain[0], rtol=1e-3)  # the oracle can tell


def test_losses_and_draws_of_keras_on_several_devices():
    result = run(BIN / "python", REPOSITORY / "tests/strangers/programs/keras_on_devices.py")
    assert result.stdout.count("as plain Keras") == 2, result.output
    assert "the same numbers are drawn again" in result.stdout, result.output
