"""Samples, networks and helpers that the scripts share. A script is a function of (hvd, rank, size).

With `hvd` None it is plain Keras in one process: `shard` then returns whole batches, and `distributed` and `callbacks`
return what a script without Horovod has.
"""

from collections import namedtuple

import keras
import numpy as np

SCRIPTS = []
HERE = []
Script = namedtuple("Script", "function has_oracle")
BATCH, STEPS, FEATURES, CLASSES = 16, 6, 4, 3


def trains(function):
    """Register a script that trains; plain Keras must end with the same."""
    SCRIPTS.append(Script(function, True))
    return function


def fails(function):
    """Register a script that is refused on several ranks."""
    SCRIPTS.append(Script(function, False))
    return function


def samples(steps=STEPS, seed=1):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(steps * BATCH, FEATURES)).astype(np.float32)
    return x, (x @ rng.normal(size=(FEATURES, CLASSES))).argmax(1)


def shard(array, rank, size):
    """Return this rank's part of each global batch of an array."""
    parts = array.reshape(-1, size, BATCH // size, *array.shape[1:])[:, rank]
    return parts.reshape(-1, *array.shape[1:])


def distributed(hvd, optimizer, **options):
    return hvd.DistributedOptimizer(optimizer, **options) if hvd else optimizer


def callbacks(hvd, *more):
    return (
        [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(), *more]
        if hvd
        else [*more]
    )


def network(rank=0):
    """Build a network with other initial weights on each rank."""
    keras.utils.set_random_seed(rank)
    hidden = keras.layers.Dense(5, activation="tanh", name="hidden")
    return keras.Sequential([keras.Input((FEATURES,)), hidden, keras.layers.Dense(CLASSES, name="logits")])


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(hvd, model, optimizer=None, **options):
    optimizer = distributed(hvd, optimizer or keras.optimizers.SGD(0.1, momentum=0.9))
    model.compile(optimizer, loss(), **{"run_eagerly": True, **options})
    return model


def fit(hvd, model, rank, size, *more, steps=STEPS, epochs=2, **options):
    """Fit as most scripts do: on this rank's shard, with the usual callbacks first."""
    x, y = (shard(array, rank, size) for array in samples(steps))
    listed = callbacks(hvd, *more)
    return model.fit(x, y, BATCH // size, epochs, callbacks=listed, shuffle=False, verbose=0, **options)
