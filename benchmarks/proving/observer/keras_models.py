"""Observes training and test steps of Keras' models: their samples, random states, running statistics."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from allstep.benchmarks.proving.observer.keras_values import call_with, some_values
from allstep.benchmarks.proving.observer.observer import Observer, replace
from allstep.benchmarks.proving.observer.values import digest, row_digests
from allstep.benchmarks.proving.records import Forward

_STEPS = {"train_step": True, "test_step": False}


def install(observer: Observer) -> None:
    """Hook the steps of every model that makes its functions from now on, also where they are the user's own."""
    hooked: set[tuple[type, str]] = set()

    def wrap_make(name: str, make: Any) -> Any:
        @functools.wraps(make)
        def observed(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
            model.jit_compile = False  # XLA calls no Python
            owner = next(kind for kind in type(model).__mro__ if name in vars(kind))
            if (owner, name) not in hooked:
                hooked.add((owner, name))
                replace(owner, name, functools.partial(_wrap_step, observer, _STEPS[name]))
            return make(model, *args, **kwargs)

        return observed

    replace(_owner("make_train_function"), "make_train_function", functools.partial(wrap_make, "train_step"))
    replace(_owner("make_test_function"), "make_test_function", functools.partial(wrap_make, "test_step"))


def _owner(name: str) -> type:
    """The class that defines a method of keras.Model."""
    return next(kind for kind in keras.Model.__mro__ if name in vars(kind))


def _wrap_step(observer: Observer, is_training: bool, step: Any) -> Any:
    @functools.wraps(step)
    def observed(model: keras.Model, data: Any) -> Any:
        line = observer.line()  # while this is traced; when it runs, nobody knows the script

        def write(num_states: Any, *arrays: Any) -> None:
            rows, states, statistics = arrays[0], arrays[1 : 1 + num_states], arrays[1 + num_states :]
            observer.write(
                Forward(
                    step=observer.num_steps_seen + 1,
                    loop=observer.num_loops,
                    is_training=is_training,
                    rows=row_digests(rows),
                    random_state="".join(map(digest, states)) or None,
                    batch_norm={f"running statistics {i}": digest(one) for i, one in enumerate(statistics)},
                    bypasses=None,
                    line=line,
                )
            )

        states = _random_states(model) if is_training else []
        statistics = [] if is_training or tf.distribute.has_strategy() else _running_statistics(model)
        call_with(write, [len(states), tf.nest.flatten(data)[0], *states, *statistics])
        return step(model, data)

    return observed


def _random_states(model: keras.Model) -> Sequence[tf.Tensor]:
    """Of the layers that draw random numbers in training."""
    layers = [layer for layer in model._flatten_layers() if getattr(layer, "rate", 0) or getattr(layer, "stddev", 0)]
    generators = [layer.seed_generator for layer in layers if getattr(layer, "seed_generator", None)]
    return [some_values(generator.state) for generator in generators]


def _running_statistics(model: keras.Model) -> Sequence[tf.Tensor]:
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
    return [some_values(one) for layer in layers for one in (layer.moving_mean, layer.moving_variance)]
