"""What Keras is taught of distributed optimizers: its functions that would lose them, or stumble over them.

Importing this module replaces them. Plain optimizers see no difference.
"""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import keras

from allstep.tensorflow.compat import (
    fill_legacy_optimizers,
    is_in_xla,
    wrap_configurations,
    wrap_loss_scaling,
    wrap_model_method,
)
from allstep.tensorflow.drop_in.optimizer import Distributed, is_distributed, restore, saved_entry
from allstep.tensorflow.drop_in.replicas import refusal
from allstep.tensorflow.drop_in.saving import KEY, Undistributed, make_plain, specialise
from allstep.tensorflow.drop_in.xla import compiled_step

_num_compiled = itertools.count()
_compiled_models: weakref.WeakValueDictionary[int, keras.Model] = weakref.WeakValueDictionary()


def compiled_models() -> list[keras.Model]:
    """The living models that are compiled with a distributed optimizer, oldest first."""
    gc.collect()  # a model is part of reference cycles: without this, ranks would see it die at different times
    models = dict.fromkeys(model for _, model in sorted(_compiled_models.items()))
    return [model for model in models if is_distributed(model.optimizer)]


def track_model(model: keras.Model) -> None:
    """Add a model to `compiled_models`."""
    _compiled_models[next(_num_compiled)] = model


def _compile(compile_: Callable[..., None]) -> Callable[..., None]:
    """`Model.compile` that knows two things about distributed optimizers.

    `jit_compile="auto"`, which means XLA on a GPU, means no with a `train_step` of the user's own: only Keras' can be
    taken apart around Horovod. And it takes `experimental_run_tf_function`, which Horovod's examples pass and Keras 3
    has dropped.
    """
    signature = inspect.signature(compile_)

    @functools.wraps(compile_)
    def compile(self, optimizer="rmsprop", *args, **kwargs):
        if not is_distributed(optimizer):
            return compile_(self, optimizer, *args, **kwargs)
        kwargs.pop("experimental_run_tf_function", None)
        call = signature.bind(self, optimizer, *args, **kwargs)
        if call.arguments.get("jit_compile", "auto") == "auto" and not has_keras_step(self):
            call.arguments["jit_compile"] = False
        track_model(self)
        return compile_(*call.args, **call.kwargs)

    return compile


def has_keras_step(model: keras.Model) -> bool:
    """Whether a model trains by Keras' own `train_step`."""
    return type(model).train_step is keras.Model.train_step


def _make_train_function(make_train_function_: Callable[..., Any]) -> Callable[..., Any]:
    """`Model.make_train_function` that has a model not train on when it was compiled with a distributed optimizer,
    and then with a plain one; and that leaves to `train_step` what XLA is to compile."""

    @functools.wraps(make_train_function_)
    def make_train_function(self, *args, **kwargs):
        if any(model is self for model in _compiled_models.values()) and (reason := refusal(self)):
            raise ValueError(reason)
        in_parts = self.jit_compile and has_keras_step(self) and is_distributed(self.optimizer)
        if not in_parts:
            return make_train_function_(self, *args, **kwargs)
        self.jit_compile = False
        try:
            return make_train_function_(self, *args, **kwargs)
        finally:
            self.jit_compile = True

    return make_train_function


def _train_step(train_step_: Callable[..., Any]) -> Callable[..., Any]:
    """`Model.train_step` that has XLA compile the parts of a step around Horovod, in place of the whole."""

    @functools.wraps(train_step_)
    def train_step(self, data):
        step = functools.partial(train_step_, self)
        if self.jit_compile and is_distributed(self.optimizer) and not is_in_xla():
            return compiled_step(step, data)
        return step(data)

    return train_step


def _loss_scale_init(init: Callable[..., None]) -> Callable[..., None]:
    """Make LossScaleOptimizer(DistributedOptimizer(x)) mean DistributedOptimizer(LossScaleOptimizer(x)).

    Keras writes the former itself under the mixed_float16 policy. It would look for non-finite values before the
    ranks' gradients meet, so one rank could skip a step in which the others wait for it.
    """

    @functools.wraps(init)
    def __init__(self, inner_optimizer, *args, **kwargs):
        init(self, inner_optimizer, *args, **kwargs)
        for mixin in (Distributed, Undistributed):
            if isinstance(inner_optimizer, mixin):
                attributes = {name: getattr(inner_optimizer, name) for name in mixin.__annotations__}
                make_plain(inner_optimizer)
                specialise(self, mixin, **attributes)

    return __init__


def _write_configuration(write: Callable[..., None]) -> Callable[..., None]:
    """Write beside an optimizer's configuration how it is distributed."""

    @functools.wraps(write)
    def get_build_and_compile_config(obj, config):
        write(obj, config)
        if isinstance(obj, keras.optimizers.Optimizer) and (saved := saved_entry(obj)):
            config[KEY] = saved

    return get_build_and_compile_config


def _read_configuration(make: Callable[..., Any]) -> Callable[..., Any]:
    """Distribute the optimizer that is made from such a configuration."""

    @functools.wraps(make)
    def deserialize_keras_object(config, *args, **kwargs):
        obj = make(config, *args, **kwargs)
        is_ours = isinstance(config, dict) and KEY in config and isinstance(obj, keras.optimizers.Optimizer)
        if is_ours and not isinstance(obj, (Distributed, Undistributed)):  # Keras may share an object made before
            restore(obj, config[KEY])
        return obj

    return deserialize_keras_object


wrap_model_method("compile", _compile)
wrap_model_method("make_train_function", _make_train_function)
wrap_model_method("train_step", _train_step)
wrap_configurations(_write_configuration, _read_configuration)
wrap_loss_scaling(_loss_scale_init)
fill_legacy_optimizers()  # scripts use them, as Horovod's wrapper could not do with the new optimizers of Keras 2.11
