"""Observes Keras' models: their samples, random states, running statistics, in fit and in a loop of one's own."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from allstep.commands.prove.observer.keras_values import call_with, some_values
from allstep.commands.prove.observer.observer import Observer, replace
from allstep.commands.prove.observer.tf_distribute import current_replica
from allstep.commands.prove.observer.values import digest, row_digests
from allstep.commands.prove.records import Forward

# What fit, evaluate and predict call a model in, and whether it trains there; nobody counts what predict says.
_STEPS = {"train": True, "test": False, "predict": None}


class Models:
    """Of one process; of a step, or a model, that calls models, only the outermost call counts."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._thread = threading.local()  # a replica is traced in its own
        self._hooked: set[tuple[type, str]] = set()

    @contextlib.contextmanager
    def _inside(self, depth: str) -> Iterator[int]:
        """A block; how many there were around it."""
        before = getattr(self._thread, depth, 0)
        setattr(self._thread, depth, before + 1)
        try:
            yield before
        finally:
            setattr(self._thread, depth, before)

    def wrap_make(self, name: str, is_training: bool | None, make: Any) -> Any:
        """What makes the function of a model's step: hooks the step, also where it is the user's own."""

        @functools.wraps(make)
        def observed(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
            owner = owner_of(name, type(model))
            if (owner, name) not in self._hooked:
                self._hooked.add((owner, name))
                replace(owner, name, functools.partial(self._wrap_step, is_training))
            return make(model, *args, **kwargs)

        return observed

    def _wrap_step(self, is_training: bool | None, step: Any) -> Any:
        @functools.wraps(step)
        def observed(model: keras.Model, data: Any) -> Any:
            with self._inside("calls") as depth:
                if is_training is not None and not depth:
                    self._observe(model, data, is_training)
                return step(model, data)

        return observed

    def wrap_call(self, call: Any) -> Any:
        """A model's call, which trains where a tape records it."""

        @functools.wraps(call)
        def observed(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
            inputs = tf.nest.flatten((args, kwargs))
            with self._inside("calls") as depth:
                if not depth and inputs and tf.is_tensor(inputs[0]) and inputs[0].shape.rank:
                    is_recorded = getattr(self._thread, "tapes", 0) > 0
                    self._observe(model, inputs, is_recorded and kwargs.get("training") is not False)
                return call(model, *args, **kwargs)

        return observed

    def wrap_export(self, export: Any) -> Any:
        """What writes the graph of a model, in which nothing of ours may stand."""

        @functools.wraps(export)
        def observed(*args: Any, **kwargs: Any) -> Any:
            with self._inside("calls"):
                return export(*args, **kwargs)

        return observed

    def wrap_enter(self, enter: Any) -> Any:
        """The beginning of a tape's block."""

        @functools.wraps(enter)
        def observed(tape: Any) -> Any:
            self._thread.tapes = getattr(self._thread, "tapes", 0) + 1
            return enter(tape)

        return observed

    def wrap_exit(self, leave: Any) -> Any:
        """Its end."""

        @functools.wraps(leave)
        def observed(tape: Any, *args: Any) -> Any:
            self._thread.tapes -= 1
            return leave(tape, *args)

        return observed

    def _observe(self, model: keras.Model, data: Any, is_training: bool) -> None:
        """Have the call that is traced, or run, write down what the model is given, and what it has."""
        observer, replica = self._observer, current_replica()
        line = observer.line_of_main()  # while this is traced; when it runs, nobody knows the script

        def write(num_states: Any, *arrays: Any) -> None:
            rows, states, statistics = arrays[0], arrays[1 : 1 + num_states], arrays[1 + num_states :]
            forward = Forward(
                step=observer.num_steps_of(replica) + 1,
                loop=observer.num_loops,
                is_training=is_training,
                rows=row_digests(rows),
                random_state="".join(map(digest, states)) or None,
                batch_norm={f"running statistics {i}": digest(one) for i, one in enumerate(statistics)},
                bypasses=None,
                line=line,
            )
            observer.write(forward, replica)

        # Keras has the replicas of a strategy draw alike, and averages their statistics where they are read.
        has_user = not tf.distribute.has_strategy()
        states = _random_states(model) if is_training and has_user else []
        statistics = _running_statistics(model) if not is_training and has_user else []
        call_with(write, [len(states), tf.nest.flatten(data)[0], *states, *statistics])


def install(observer: Observer) -> None:
    """Hook every model that makes its functions, or is called, from now on."""
    models = Models(observer)
    for kind, is_training in _STEPS.items():
        make = f"make_{kind}_function"
        replace(owner_of(make), make, functools.partial(models.wrap_make, f"{kind}_step", is_training))
    replace(keras.Model, "__call__", models.wrap_call)
    replace(keras.Model, "export", models.wrap_export)
    replace(tf.saved_model, "save", models.wrap_export)
    replace(tf.GradientTape, "__enter__", models.wrap_enter)
    replace(tf.GradientTape, "__exit__", models.wrap_exit)


def owner_of(name: str, kind: type = keras.Model) -> type:
    """The class that defines a method of a model."""
    return next(one for one in kind.__mro__ if name in vars(one))


def _random_states(model: keras.Model) -> Sequence[tf.Tensor]:
    """Of the layers that draw random numbers in training."""
    layers = [layer for layer in model._flatten_layers() if getattr(layer, "rate", 0) or getattr(layer, "stddev", 0)]
    generators = [layer.seed_generator for layer in layers if getattr(layer, "seed_generator", None)]
    return [some_values(generator.state) for generator in generators]


def _running_statistics(model: keras.Model) -> Sequence[tf.Tensor]:
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
    return [some_values(one) for layer in layers for one in (layer.moving_mean, layer.moving_variance)]
