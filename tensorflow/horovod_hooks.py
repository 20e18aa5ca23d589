"""What Keras is taught of distributed optimizers: its functions that would lose them, or stumble over them.

Importing this module replaces them. Plain optimizers see no difference.
"""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import sys
import weakref

import keras
from keras.src.saving import serialization_lib

import tensorflow as tf
from allstep.tensorflow.horovod_optimizer import Distributed, is_distributed, restore, saved_entry
from allstep.tensorflow.horovod_replicas import refusal
from allstep.tensorflow.horovod_saving import KEY, Undistributed, make_plain, specialise
from allstep.tensorflow.horovod_xla import compiled_step, is_inside

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


def _where_defined(method: str) -> type:
    return next(cls for cls in keras.Model.__mro__ if method in vars(cls))


def _let_compile_know() -> None:
    """Teach `Model.compile` two things about distributed optimizers.

    `jit_compile="auto"`, which means XLA on a GPU, means no with a `train_step` of the user's own: only Keras' can be
    taken apart around Horovod. And it takes `experimental_run_tf_function`, which Horovod's examples pass and Keras 3
    has dropped.
    """
    trainer = _where_defined("compile")
    compile_ = trainer.compile
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

    trainer.compile = compile


def has_keras_step(model: keras.Model) -> bool:
    """Whether a model trains by Keras' own `train_step`."""
    return type(model).train_step is keras.Model.train_step


def _let_training_know() -> None:
    """Have a model that was compiled with a distributed optimizer, and then with a plain one, not train on.

    And have XLA compile the parts of a step around Horovod, in place of the whole.
    """
    trainer = _where_defined("make_train_function")
    make_train_function_, train_step_ = trainer.make_train_function, trainer.train_step

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

    @functools.wraps(train_step_)
    def train_step(self, data):
        step = functools.partial(train_step_, self)
        if self.jit_compile and is_distributed(self.optimizer) and not is_inside():
            return compiled_step(step, data)
        return step(data)

    trainer.make_train_function = make_train_function
    trainer.train_step = train_step


def _let_loss_scaling_know() -> None:
    """Make LossScaleOptimizer(DistributedOptimizer(x)) mean DistributedOptimizer(LossScaleOptimizer(x)).

    Keras writes the former itself under the mixed_float16 policy. It would look for non-finite values before the
    ranks' gradients meet, so one rank could skip a step in which the others wait for it.
    """
    loss_scale_optimizer = keras.optimizers.LossScaleOptimizer
    init = loss_scale_optimizer.__init__

    @functools.wraps(init)
    def __init__(self, inner_optimizer, *args, **kwargs):
        init(self, inner_optimizer, *args, **kwargs)
        for mixin in (Distributed, Undistributed):
            if isinstance(inner_optimizer, mixin):
                attributes = {name: getattr(inner_optimizer, name) for name in mixin.__annotations__}
                make_plain(inner_optimizer)
                specialise(self, mixin, **attributes)

    loss_scale_optimizer.__init__ = __init__


def _let_saving_know() -> None:
    """Write beside an optimizer's configuration how it is distributed, and distribute what is made from such a one."""
    write, make = serialization_lib.get_build_and_compile_config, serialization_lib.deserialize_keras_object

    @functools.wraps(write)
    def get_build_and_compile_config(obj, config):
        write(obj, config)
        if isinstance(obj, keras.optimizers.Optimizer) and (saved := saved_entry(obj)):
            config[KEY] = saved

    @functools.wraps(make)
    def deserialize_keras_object(config, *args, **kwargs):
        obj = make(config, *args, **kwargs)
        is_ours = isinstance(config, dict) and KEY in config and isinstance(obj, keras.optimizers.Optimizer)
        if is_ours and not isinstance(obj, (Distributed, Undistributed)):  # Keras may share an object made before
            restore(obj, config[KEY])
        return obj

    serialization_lib.get_build_and_compile_config = get_build_and_compile_config
    # Keras' modules import it by name.
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "keras" and vars(module).get("deserialize_keras_object") is make:
            module.deserialize_keras_object = deserialize_keras_object


def _let_legacy_names_work() -> None:
    """Give `keras.optimizers.legacy.Adam` and its kin Keras 3's meaning; as they come they only raise an error.

    Scripts use them because Horovod's wrapper could not do with the new optimizers of Keras 2.11.
    """
    for module in (keras.optimizers.legacy, tf.keras.optimizers.legacy):
        for name in ("Adagrad", "Adam", "Ftrl", "Optimizer", "RMSprop", "SGD"):
            setattr(module, name, getattr(keras.optimizers, name))


_let_compile_know()
_let_training_know()
_let_saving_know()
_let_loss_scaling_know()
_let_legacy_names_work()
