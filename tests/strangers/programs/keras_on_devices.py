"""Keras' own losses on two devices, where Keras divides them by the number of replicas; run by test_keras_losses.py.

Sessions of several shapes follow each other. Oracle: `fit` of plain Keras with the whole batch.
"""

from __future__ import annotations

from functools import partial

import keras
import numpy as np
from keras import layers

from allstep.tensorflow import Session

SIZE, EPOCHS, RATE = 24, 3, 0.05
X, Y = np.random.default_rng(0).standard_normal((SIZE, 5)).astype(np.float32), np.arange(SIZE) % 3
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Near(layers.Layer):
    """Adds a loss of Keras to that of the outputs."""

    def call(self, inputs):
        self.add_loss(keras.losses.MeanSquaredError()(keras.ops.zeros_like(inputs), inputs))
        return inputs


class Draws(layers.Layer):
    """Draws from Keras' global generator, of which each thread has one, and tf.distribute has a thread a device."""

    def call(self, inputs, training=False):
        return inputs + keras.random.normal(keras.ops.shape(inputs)) if training else inputs


def build_noisy() -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential([layers.Input((5,)), layers.Dense(7), Draws(), layers.Dense(3)])


def build(width: int) -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential([layers.Input((5,)), layers.Dense(width, kernel_regularizer="l2"), Near(), layers.Dense(3)])


def trained(build, loss: object, **more: bool) -> keras.Model:
    models, data = [], (X, Y)
    flags = {"strategy": "mirrored", "num_devices": 2, "epochs": EPOCHS, "global_batch_size": SIZE, "loss": loss}
    flags |= {"optimizer": "sgd", "momentum": 0.0, "base_lr": RATE, **more}
    Session(lambda *_: models.append(build()) or models[0], data, data, **flags).fit()
    return models[0]


if __name__ == "__main__":
    for width, loss in ((7, LOSS), (6, lambda outputs, targets: LOSS(targets, outputs))):
        found, expected = trained(partial(build, width), loss), build(width)
        expected.compile(keras.optimizers.SGD(RATE), LOSS, run_eagerly=True)
        expected.fit(X, Y, SIZE, EPOCHS, verbose=0)
        for one, other in zip(found.weights, expected.weights, strict=True):
            np.testing.assert_allclose(one.numpy(), other.numpy(), 1e-4, 1e-5, err_msg=other.path)
        print("as plain Keras", flush=True)
    noisy = (trained(build_noisy, LOSS), trained(build_noisy, LOSS, recompute=True))
    for one, other in zip(*(model.weights for model in noisy), strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), 1e-4, 1e-5, err_msg=other.path)
    print("the same numbers are drawn again", flush=True)
