"""List of the cases that keras_behaviour.py runs, and the small network and samples that they share."""

import sys
from pathlib import Path

import keras
import numpy as np

import allstep.tensorflow.horovod_keras as hvd

DIRECTORY = Path(sys.argv[1])
CASES = []


def case(function):
    """Register `function`, whose result must be serialisable as JSON, for keras_behaviour.py."""
    CASES.append(function)
    return function


def network(*, seed: int = 0, units: int = 3) -> keras.Model:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(5, activation="tanh", name="hidden"), keras.layers.Dense(units, name="logits")]
    return keras.Sequential([keras.Input((4,)), *layers])


def compiled(optimizer, *, seed: int = 0, run_eagerly: bool = True, **options) -> keras.Model:
    """Build and compile the network, by default for eager steps, because tracing would take longer than a few steps."""
    model = network(seed=seed)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, run_eagerly=run_eagerly, **options)
    return model


def samples(*, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(32, 4)).astype(np.float32), rng.integers(0, 3, size=32)


def fit(model, *callbacks, epochs=1, seed=None, batch_size=16, **options):
    """Fit on this rank's samples, or on those of a seed, by default in two batches."""
    x, y = samples(seed=hvd.rank() if seed is None else seed)
    return model.fit(x, y, batch_size, epochs, 0, [*callbacks], shuffle=False, **options)


def values(variables) -> list:
    return [np.asarray(getattr(v, "value", v), np.float64).tolist() for v in variables]


def error(function, *args, **options) -> str:
    try:
        function(*args, **options)
    except Exception as exception:
        return f"{type(exception).__name__}: {exception}"
    return "no error"
