"""Observe Keras' models: their samples, random states and running statistics, in fit and in custom loops."""

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from allstep.commands.prove.observer.guarding import Arguments
from allstep.commands.prove.observer.observer import Observer, owner_of, replace
from allstep.commands.prove.observer.tf_distribute import current_replica
from allstep.commands.prove.observer.values import Samples, digest, stride
from allstep.commands.prove.records import RUNNING, Forward

# Steps in which fit, evaluate and predict call a model, and whether it trains there; predictions are not checked.
_STEPS = {"train": True, "test": False, "predict": None}

_MOVING = ("/moving_mean", "/moving_variance")
"""Ends of the paths of running statistics."""


class Models:
    """Models of one process. If a step or a model calls other models, only the outermost call counts."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._thread = threading.local()  # each replica is traced in its own thread
        self._hooked: set[tuple[type, str]] = set()
        self._rows = observer.quiet("inputs of models without digests", Samples(_as_rows).sized, ((), 0))

    @contextlib.contextmanager
    def _inside(self) -> Iterator[int]:
        """Enter a call; yield how many calls surround it."""
        before = getattr(self._thread, "calls", 0)
        self._thread.calls = before + 1
        try:
            yield before
        finally:
            self._thread.calls = before

    def observe_make(self, kind: str) -> Any:
        """Return an observer of the maker of a model's step function, which hooks the step, if overridden, too."""
        name = f"{kind}_step"

        def observe(model: keras.Model, *_args: Any, **_kwargs: Any) -> Generator[None, Any, None]:
            owner = owner_of(name, type(model))
            if (owner, name) not in self._hooked:
                self._hooked.add((owner, name))
                replace(owner, name, self._observer.around("steps of models", self._observe_step(_STEPS[kind])))
            yield

        return observe

    def _observe_step(self, is_training: bool | None) -> Any:
        def observe(model: keras.Model, data: Any) -> Generator[None, Any, None]:
            with self._inside() as depth:
                if is_training is not None and not depth:
                    self._observe(model, data, is_training, evaluates=not is_training)
                yield

        return observe

    def observe_call(self, model: keras.Model, *args: Any, **kwargs: Any) -> Generator[None, Any, None]:
        """Observe a model's call, which counts as training if a tape records it."""
        inputs = tf.nest.flatten((args, kwargs), expand_composites=True)
        with self._inside() as depth:
            if not depth and any(tf.is_tensor(one) and one.shape.rank for one in inputs):
                is_recorded = getattr(self._thread, "tapes", 0) > 0
                self._observe(model, inputs, is_recorded and kwargs.get("training") is not False)
            yield

    def observe_export(self, *_args: Any, **_kwargs: Any) -> Generator[None, Any, None]:
        """Observe the export of a model's graph, which must not contain operations of the observer."""
        with self._inside():
            yield

    def observe_enter(self, _tape: Any) -> Generator[None, Any, None]:
        """Observe the entry of a tape's block."""
        self._thread.tapes = getattr(self._thread, "tapes", 0) + 1
        yield

    def observe_exit(self, _tape: Any, *_args: Any) -> Generator[None, Any, None]:
        """Observe the exit of a tape's block."""
        self._thread.tapes -= 1
        yield

    def _observe(self, model: keras.Model, data: Any, is_training: bool, *, evaluates: bool | None = None) -> None:
        """Make the call that is being traced or run record the model's inputs and states."""
        observer, replica = self._observer, current_replica()
        callers = observer.callers()
        line = observer.line_of_main()  # while this is traced; when it runs, the script is not on the stack

        def write(num_inputs: Any, num_states: Any, *arrays: Any) -> None:
            inputs, others = list(arrays[:num_inputs]), arrays[num_inputs:]
            states, statistics = others[:num_states], others[num_states:]
            rows, num_bytes = self._rows(inputs, (line, id(model), replica, is_training))
            forward = Forward(
                step=observer.progress.num_steps_of(replica) + 1,
                loop=observer.progress.loop,
                is_training=is_training,
                rows=rows,
                random_state="".join(map(digest, states)) or None,
                buffers={name: digest(one) for name, one in zip(buffers, statistics, strict=True)},
                bypasses=None,
                line=line,
                callers=callers,
                evaluates=evaluates,
                num_bytes=num_bytes,
            )
            observer.write(forward, replica)

        # Keras gives the replicas of a strategy the same random state, and averages their statistics on reading.
        has_no_strategy = not tf.distribute.has_strategy()
        states = _random_states(model) if is_training and has_no_strategy else []
        buffers = dict(_buffers(model, is_training)) if has_no_strategy else {}
        flat = tf.nest.flatten(data, expand_composites=True)
        inputs = [one for one in flat if tf.is_tensor(one) and one.dtype not in (tf.resource, tf.variant)]
        tensors = [len(inputs), len(states), *inputs, *states, *buffers.values()]
        call_with(observer.quiet("calls of models", write), tensors)


def install(observer: Observer) -> None:
    """Hook every model that makes its step functions or is called from now on."""
    models = Models(observer)
    around = observer.around

    def observe_function(*args: Any, jit_compile: bool | None = None, **kwargs: Any) -> Generator[Arguments, Any, None]:
        yield args, kwargs  # uncompiled, since XLA cannot call Python

    replace(tf, "function", around("compiled functions", observe_function))
    for kind in _STEPS:
        make = f"make_{kind}_function"
        replace(owner_of(make, keras.Model), make, around("steps of models", models.observe_make(kind)))
    replace(keras.Model, "__call__", around("calls of models", models.observe_call))
    replace(keras.Model, "export", around("exported models", models.observe_export))
    replace(tf.saved_model, "save", around("exported models", models.observe_export))
    replace(tf.GradientTape, "__enter__", around("tapes", models.observe_enter))
    replace(tf.GradientTape, "__exit__", around("tapes", models.observe_exit))


def _as_rows(value: Any) -> np.ndarray | None:
    """Return an array of samples, with strings as bytes; None for anything else, and for a single number."""
    if not isinstance(value, np.ndarray) or not value.ndim:
        return None
    return (
        value
        if value.dtype != object
        else np.array([b"\0".join(row.reshape(-1)) for row in value.reshape(len(value), -1)])
    )


def _random_states(model: keras.Model) -> Sequence[tf.Tensor]:
    """Return the random states of the layers that draw random numbers in training."""
    layers = [layer for layer in model._flatten_layers() if getattr(layer, "rate", 0) or getattr(layer, "stddev", 0)]
    generators = [layer.seed_generator for layer in layers if getattr(layer, "seed_generator", None)]
    return [some_values(generator.state) for generator in generators]


def _buffers(model: keras.Model, is_training: bool) -> Iterator[tuple[str, tf.Tensor]]:
    """Yield the running statistics of a model in evaluation, and what else it does not train in training."""
    for index, one in enumerate(model.non_trainable_variables):
        is_running = one.path.endswith(_MOVING)
        if one.dtype.startswith(("float", "bfloat")) and is_running != is_training:
            yield f"{one.path} {RUNNING[0] if is_running else index}", some_values(one)


def native(variable: Any) -> Any:
    """Return the tf.Variable of a Keras variable, or any other value itself."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def some_values(tensor: Any) -> tf.Tensor:
    """Return the values of a tensor that are projected or digested, as a vector."""
    flat = tf.reshape(tf.convert_to_tensor(native(tensor)), [-1])
    return flat[:: stride(flat.shape.num_elements() or 1)]


def call_with(function: Callable[..., None], tensors: Sequence[Any]) -> None:
    """Call a function with arrays whenever the graph that is being traced runs, or at once without a graph."""

    def call(*arrays: Any) -> None:
        function(*arrays)

    tf.numpy_function(call, list(tensors), [])
