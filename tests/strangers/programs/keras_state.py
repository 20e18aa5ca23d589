"""A Keras model with a counter, a flag and a mask that is not finite, on the ranks at hand; run by test_keras_state.py.

    python keras_state.py DIRECTORY STRATEGY

It is trained in two parts, the second one from the checkpoint of the first. Oracle: a plain loop in one process.
"""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf

from allstep.common.base.errors import UserError
from allstep.common.data.sharding import sample_order
from allstep.tensorflow import Session

DIRECTORY, STRATEGY = sys.argv[1:]
SIZE, BATCH, EPOCHS, RATE = 24, 8, 2, 0.05
random = np.random.default_rng(0)
X, Y = random.normal(size=(SIZE, 6)).astype(np.float32), np.arange(SIZE) % 3


class Counting(keras.layers.Layer):
    """A layer that depends on how often it was called in training."""

    def build(self, shape: tuple) -> None:
        mask = np.triu(np.full((6, 6), -np.inf, np.float32), 1)
        self.steps = self.add_weight(shape=(), dtype="int32", trainable=False, initializer="zeros", name="steps")
        self.has_begun = self.add_weight(shape=(), dtype="bool", trainable=False, initializer="zeros", name="has_begun")
        self.mask = self.add_weight(shape=(6, 6), trainable=False, initializer=lambda *_, **__: mask, name="mask")

    def call(self, inputs, training=False):
        if training:
            self.steps.assign(self.steps + 1)
            self.has_begun.assign(True)
        hidden = inputs * (1 + 0.1 * tf.cast(self.steps, "float32")) * (1 + tf.cast(self.has_begun, "float32"))
        shares = tf.nn.softmax(hidden[:, :, None] * hidden[:, None, :] + self.mask)
        return (shares @ hidden[:, :, None])[..., 0]


def build(*_):
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((6,)), dense(6, "tanh", name="a"), Counting(name="count"), dense(3, name="b")])


def expected() -> keras.Model:
    model, optimizer = build(), keras.optimizers.SGD(RATE, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for epoch in range(EPOCHS):
        order = sample_order(np.arange(SIZE), SIZE, seed=0, epoch=epoch)
        for begin in range(0, SIZE, BATCH):
            chosen = order[begin : begin + BATCH]
            with tf.GradientTape() as tape:
                total = loss(Y[chosen], model(X[chosen], training=True))
            optimizer.apply(
                tape.gradient(total, [one.value for one in model.trainable_variables]), model.trainable_variables
            )
    return model


if __name__ == "__main__":
    models = []
    flags = {"strategy": STRATEGY, "output_dir": DIRECTORY, "global_batch_size": BATCH, "base_lr": RATE}
    for more in ({"epochs": 1}, {"epochs": EPOCHS, "resume": "latest"}):
        models.append(build())
        Session(models[-1], (X, Y), (X, Y), weight_decay=0.0, **flags, **more).fit()
    for found, wanted in zip(models[-1].weights, expected().weights, strict=True):
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(found.value.numpy(), wanted.value.numpy(), 1e-4, 1e-5, err_msg=found.path)
    print("as in one process", flush=True)
    other, optimizer = build(), keras.optimizers.SGD(RATE)
    optimizer.build(other.trainable_variables)
    if STRATEGY == "single":
        try:
            Session(build(), (X, Y), (X, Y), optimizer=optimizer, epochs=1).fit()
        except UserError as error:
            print(error)
