"""Observe Keras' models: their samples, random states and running statistics, in fit and in custom loops."""

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

# Steps in which fit, evaluate and predict call a model, and whether it trains there; predictions are not checked.
_STEPS = {"train": True, "test": False, "predict": None}


class Models:
    """Models of one process. If a step or a model calls other models, only the outermost call counts."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._thread = threading.local()  # each replica is traced in its own thread
        self._hooked: set[tuple[type, str]] = set()

    @contextlib.contextmanager
    def _inside(self, depth: str) -> Iterator[int]:
        """Enter a block of the kind `depth`; yield how many such blocks surround it."""
        before = getattr(self._thread, depth, 0)
        setattr(self._thread, depth, before + 1)
        try:
            yield before
        finally:
            setattr(self._thread, depth, before)

    def wrap_make(self, name: str, is_training: bool | None, make: Any) -> Any:
        """Wrap the maker of a model's step function, to hook the step even if the user has overridden it."""

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
        """Wrap a model's call, which counts as training if a tape records it."""

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
        """Wrap a function that exports the graph of a model, which must not contain operations of the observer."""

        @functools.wraps(export)
        def observed(*args: Any, **kwargs: Any) -> Any:
            with self._inside("calls"):
                return export(*args, **kwargs)

        return observed

    def wrap_enter(self, enter: Any) -> Any:
        """Wrap the entry of a tape's block."""

        @functools.wraps(enter)
        def observed(tape: Any) -> Any:
            self._thread.tapes = getattr(self._thread, "tapes", 0) + 1
            return enter(tape)

        return observed

    def wrap_exit(self, leave: Any) -> Any:
        """Wrap the exit of a tape's block."""

        @functools.wraps(leave)
        def observed(tape: Any, *args: Any) -> Any:
            self._thread.tapes -= 1
            return leave(tape, *args)

        return observed

    def _observe(self, model: keras.Model, data: Any, is_training: bool) -> None:
        """Make the call that is being traced or run record the model's inputs and states."""
        observer, replica = self._observer, current_replica()
        line = observer.line_of_main()  # while this is traced; when it runs, the script is not on the stack

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

        # Keras gives the replicas of a strategy the same random state, and averages their statistics on reading.
        has_no_strategy = not tf.distribute.has_strategy()
        states = _random_states(model) if is_training and has_no_strategy else []
        statistics = _running_statistics(model) if not is_training and has_no_strategy else []
        call_with(write, [len(states), tf.nest.flatten(data)[0], *states, *statistics])


def install(observer: Observer) -> None:
    """Hook every model that makes its step functions or is called from now on."""
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
    """Return the class that defines a method of a model."""
    return next(one for one in kind.__mro__ if name in vars(one))


def _random_states(model: keras.Model) -> Sequence[tf.Tensor]:
    """Return the random states of the layers that draw random numbers in training."""
    layers = [layer for layer in model._flatten_layers() if getattr(layer, "rate", 0) or getattr(layer, "stddev", 0)]
    generators = [layer.seed_generator for layer in layers if getattr(layer, "seed_generator", None)]
    return [some_values(generator.state) for generator in generators]


def _running_statistics(model: keras.Model) -> Sequence[tf.Tensor]:
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
    return [some_values(one) for layer in layers for one in (layer.moving_mean, layer.moving_variance)]
