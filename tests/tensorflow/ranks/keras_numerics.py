"""Train a small network for each case, and its single-process oracle, for test_horovod_keras.py.

Usage: horovodrun -np 2 python keras_numerics.py DIRECTORY CASE... Each rank writes DIRECTORY/rank{r}.npz with
"{case}/{i}" = weight i after training. One of the ranks adds "{case}/oracle/{i}" = the same weight after plain Keras,
without Horovod, has trained on the whole batch in one process.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import allstep.tensorflow.horovod_keras as hvd

GLOBAL_BATCH, NUM_STEPS, NUM_FEATURES, NUM_CLASSES, VOCABULARY = 16, 3, 6, 3, 10
optimizers = keras.optimizers
losses = keras.losses


@dataclass
class Case:
    optimizer: Callable[[], Any]
    options: dict = field(default_factory=dict)  # arguments of DistributedOptimizer
    oracle: Callable[[], Any] | None = None  # the oracle's optimizer, if different
    network: str = "dense"
    run_eagerly: bool = False
    jit_compile: bool = False
    wrap: Callable[[Any], Any] = lambda optimizer: optimizer  # wraps the DistributedOptimizer


def sgd(**options):
    return lambda: optimizers.SGD(**{"learning_rate": 0.1, **options})


def adam(**options):
    return lambda: optimizers.Adam(learning_rate=0.01, **options)


def adamw(**options):
    return lambda: optimizers.AdamW(learning_rate=0.01, weight_decay=0.1, **options)


def loss_scaled(inner, **options):
    return lambda: optimizers.LossScaleOptimizer(inner(), initial_scale=8.0, dynamic_growth_steps=2, **options)


CASES = {
    "sgd": Case(sgd()),
    "nesterov": Case(sgd(momentum=0.9, nesterov=True)),
    "adam": Case(adam()),
    "adam_schedule": Case(lambda: optimizers.Adam(optimizers.schedules.CosineDecay(0.05, 4))),
    "weight_decay": Case(adamw()),
    "clipnorm": Case(sgd(clipnorm=0.05)),
    "clipvalue": Case(sgd(clipvalue=0.01)),
    "global_clipnorm": Case(sgd(global_clipnorm=0.05)),
    "ema": Case(sgd(use_ema=True, ema_momentum=0.5)),
    "ema_overwrite": Case(sgd(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)),
    "accumulation": Case(adam(gradient_accumulation_steps=2, clipnorm=0.05)),
    "accumulation_eager": Case(adam(gradient_accumulation_steps=2, clipnorm=0.05), run_eagerly=True),
    "accumulation_embedding": Case(sgd(gradient_accumulation_steps=2), network="embedding"),
    "passes_averaged": Case(
        adam(clipnorm=0.05),
        {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
        oracle=adam(gradient_accumulation_steps=2, clipnorm=0.05),
    ),
    "passes_summed": Case(
        sgd(), {"backward_passes_per_step": 3}, oracle=sgd(learning_rate=0.3, gradient_accumulation_steps=3)
    ),
    "loss_scale_factor": Case(adam(loss_scale_factor=64.0, global_clipnorm=0.05)),
    "loss_scale_inside": Case(loss_scaled(adam(clipnorm=0.05))),
    "loss_scale_outside": Case(
        adam(clipnorm=0.05),
        wrap=lambda inner: optimizers.LossScaleOptimizer(inner, initial_scale=8.0, dynamic_growth_steps=2),
        oracle=loss_scaled(adam(clipnorm=0.05)),
    ),
    "loss_scale_accumulation": Case(
        loss_scaled(sgd()),
        {"backward_passes_per_step": 2},
        oracle=loss_scaled(sgd(learning_rate=0.2, gradient_accumulation_steps=2)),
    ),
    "embedding": Case(adam(), network="embedding"),
    "embedding_clipnorm": Case(sgd(clipnorm=0.05), network="embedding"),
    # Not Adam: for IndexedSlices, Keras squares rows of the same index separately; for dense gradients, their sum.
    "embedding_as_dense": Case(sgd(momentum=0.9), {"sparse_as_dense": True}, network="embedding"),
    "embedding_predivide": Case(sgd(), {"gradient_predivide_factor": 2.0}, network="embedding"),
    "positions": Case(adam(), network="positions"),
    "positions_clipped_eager": Case(adam(clipnorm=0.05), network="positions", run_eagerly=True),
    "unused_layer": Case(adam(clipnorm=0.05), network="unused"),
    "unused_layer_accumulation": Case(sgd(gradient_accumulation_steps=2), network="unused"),
    "constraint": Case(sgd(), network="constraint"),
    "eager": Case(adam(clipnorm=0.05), run_eagerly=True),
    "sum": Case(sgd(), {"op": hvd.Sum}, oracle=sgd(learning_rate=0.2)),
    "fp16": Case(sgd(), {"compression": hvd.Compression.fp16}),
    "fp16_embedding": Case(sgd(), {"compression": hvd.Compression.fp16}, network="embedding"),
    "two_groups": Case(adam(), {"groups": 2}),
    "more_groups_than_gradients": Case(adam(), {"groups": 99}),
    "predivide": Case(adam(), {"gradient_predivide_factor": 2.0}),
    "devices": Case(adam(), {"device_dense": "/cpu:0", "device_sparse": "/cpu:0"}, network="embedding"),
    "muon": Case(lambda: optimizers.Muon(learning_rate=0.01)),
    "custom_training_step": Case(adam(clipnorm=0.05), network="custom_step"),
    "bfloat16": Case(sgd(), network="bfloat16"),
    "xla": Case(adam(clipnorm=0.05), jit_compile=True),
    "xla_accumulation": Case(adam(gradient_accumulation_steps=2, clipnorm=0.05), jit_compile=True),
    "xla_loss_scale": Case(loss_scaled(adam(clipnorm=0.05)), jit_compile=True),
    "xla_embedding": Case(adam(), network="embedding", jit_compile=True),
}


@keras.saving.register_keras_serializable("test")
class CustomStep(keras.Sequential):
    """Model with the training step of Keras' guides, which passes pairs to apply_gradients."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"loss": loss}


def network(kind: str, seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    dense = [keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(NUM_CLASSES)]
    inputs = keras.Input((NUM_FEATURES,))
    match kind:
        case "embedding":
            embedded = [keras.layers.Embedding(VOCABULARY, 4), keras.layers.Flatten()]
            return keras.Sequential([keras.Input((NUM_FEATURES,), dtype="int32"), *embedded, *dense])
        case "positions":
            return keras.Sequential([inputs, Positions(), *dense])
        case "unused":
            outputs = dense[1](dense[0](inputs))
            return Unused(inputs, outputs)
        case "constraint":
            dense[0].kernel_constraint = keras.constraints.MaxNorm(0.5)
        case "custom_step":
            return CustomStep([inputs, *dense])
        case "bfloat16":
            dense[0] = keras.layers.Dense(5, activation="tanh", dtype="bfloat16")
    return keras.Sequential([inputs, *dense])


class Unused(keras.Model):
    """Model with a trainable weight on which no output depends, so its gradient is None."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.unused = self.add_weight(shape=(2,), initializer="ones", name="unused")


class Positions(keras.layers.Layer):
    """Adds an embedding of positions, whose rows do not depend on samples."""

    def build(self, shape):
        self.embedding = keras.layers.Embedding(NUM_FEATURES, 1)
        self.embedding.build(())

    def call(self, inputs):
        return inputs + self.embedding(np.arange(NUM_FEATURES))[:, 0]


def samples(kind: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(NUM_STEPS * GLOBAL_BATCH, NUM_FEATURES)).astype(np.float32)
    if kind == "embedding":
        x = rng.integers(0, VOCABULARY, size=x.shape).astype(np.int32)
    return x, rng.integers(0, NUM_CLASSES, size=len(x))


def train(case: Case, optimizer: Any, *, seed: int, rank: int, size: int, callbacks: list, **options: bool) -> list:
    """Fit on this rank's contiguous slice of each global batch, and return weights and optimizer state."""
    model = network(case.network, seed)
    model.compile(optimizer, losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    x, y = (a.reshape(NUM_STEPS, size, GLOBAL_BATCH // size, *a.shape[1:])[:, rank] for a in samples(case.network))
    x, y = x.reshape(-1, *x.shape[2:]), y.reshape(-1)
    model.fit(x, y, GLOBAL_BATCH // size, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    return [np.asarray(v.value, np.float64) for v in [*model.weights, *model.optimizer.variables]]


def main() -> None:
    hvd.init()
    results = {}
    for number, name in enumerate(sys.argv[2:]):
        case = CASES[name]
        optimizer = case.wrap(hvd.DistributedOptimizer(case.optimizer(), **case.options))
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        # Each rank starts from different weights, which the callback must make equal.
        trained = train(
            case,
            optimizer,
            seed=hvd.rank(),
            rank=hvd.rank(),
            size=hvd.size(),
            callbacks=[broadcast],
            run_eagerly=case.run_eagerly,
            jit_compile=case.jit_compile,
        )
        results |= {f"{name}/{i}": array for i, array in enumerate(trained)}
        if hvd.rank() == number % hvd.size():  # distribute the oracles over the ranks
            plain = (case.oracle or case.optimizer)()
            expected = train(case, plain, seed=0, rank=0, size=1, callbacks=[], run_eagerly=True, jit_compile=False)
            results |= {f"{name}/oracle/{i}": array for i, array in enumerate(expected)}
    np.savez(Path(sys.argv[1]) / f"rank{hvd.rank()}.npz", **results)


if __name__ == "__main__":
    main()
