"""What we use of the insides of TensorFlow and Keras; `tests/tensorflow/test_compat.py` tries each.

Nothing here is promised by its library. Looked up in TensorFlow 2.21, and Keras 3.12 and 3.15. Beside these,
`horovod_optimizer.Distributed` overrides `_clip_gradients`, through which a Keras optimizer passes the mean of the
gradients that it has accumulated; and `optimizers.base.Optimizer` overrides `_apply_weight_decay` and
`_backend_update_step`, by which a step goes from its gradients to the weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import h5py
import keras
import tensorflow as tf
from keras.src.legacy.saving.legacy_h5_format import load_optimizer_weights_from_hdf5_group
from keras.src.saving import serialization_lib
from tensorflow.python.eager.context import anonymous_name
from tensorflow.python.ops import control_flow_util


def is_in_xla() -> bool:
    """Whether what is being traced is compiled by XLA; TensorFlow asks this of itself for its loops."""
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def momentary_variable(value: tf.Tensor) -> tf.Tensor:
    """The handle of a variable that starts as the value and goes with the handle, for kernels that update variables.

    By the name that TensorFlow gives variables of eager code, each execution makes one of its own. XLA refuses it.
    """
    handle = tf.raw_ops.VarHandleOp(dtype=value.dtype, shape=value.shape, shared_name=anonymous_name())
    tf.raw_ops.AssignVariableOp(resource=handle, value=value)
    return handle


def trained_variables(optimizer: keras.Optimizer) -> list[Any]:
    """The variables that the optimizer was built for, in the order of its slots: `_trainable_variables`."""
    return optimizer._trainable_variables


def parts(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """Return the optimizers inside a `MultiOptimizer`, or the optimizer itself."""
    return optimizer.optimizers if isinstance(optimizer, keras.optimizers.MultiOptimizer) else [optimizer]


def leave_gradients_as_they_are(optimizer: keras.Optimizer) -> None:
    """Have `apply` take gradients that are added up over the replicas of tf.distribute already.

    A Keras optimizer adds them up itself, in `_all_reduce_sum_gradients`.
    """
    for part in parts(optimizer):
        part._all_reduce_sum_gradients = lambda pairs: pairs  # pyright: ignore[reportAttributeAccessIssue]


def variable_index(optimizer: keras.Optimizer, variable: Any) -> int:
    """The place of a variable among `trained_variables`, of one of TensorFlow's as well: `_get_variable_index`."""
    return optimizer._get_variable_index(variable)


def accumulated_gradients(optimizer: keras.Optimizer) -> list[Any]:
    """The variables in which the optimizer adds gradients up: `_accumulated_gradients`, which only some have."""
    return [variable for variable in getattr(optimizer, "_accumulated_gradients", ()) if variable is not None]


def rmsprop_momentums(optimizer: keras.optimizers.RMSprop) -> Sequence[Any]:
    """The slots with its velocity, which contains the learning rate: `_momentums`, empty without momentum."""
    return optimizer._momentums


def layers_of(model: keras.Model) -> Iterable[keras.layers.Layer]:
    """The model and all layers inside it, however deep: `_flatten_layers`; `model.layers` has the outermost alone."""
    return model._flatten_layers()


def pickled_as(kind: type, reduced: tuple) -> tuple:
    """What `__reduce__` of an object of a subclass of `kind` returned, made to name `kind`.

    Keras pickles by `_unpickle_model`, a method of the object's class, with the archive as its arguments.
    """
    _, arguments = reduced
    return kind._unpickle_model, arguments  # pyright: ignore[reportAttributeAccessIssue]


def h5_optimizer_weights(file: h5py.File) -> list[Any]:
    """The optimizer's variables in an .h5 file of a model, in its order."""
    return load_optimizer_weights_from_hdf5_group(file)


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes a function, and returns what is to stand in its place."""


def wrap_model_method(name: str, wrap: Wrap) -> None:
    """Replace a method of `keras.Model` where it is defined: in Keras' Trainer, a base class.

    Keras calls `make_train_function` at the start of each `fit` and `train_on_batch`.
    """
    owner = next(kind for kind in keras.Model.__mro__ if name in vars(kind))
    setattr(owner, name, wrap(getattr(owner, name)))


def wrap_loss_scaling(wrap: Wrap) -> None:
    """Replace the `__init__` of `LossScaleOptimizer`, which Keras makes itself under the mixed_float16 policy."""
    keras.optimizers.LossScaleOptimizer.__init__ = wrap(keras.optimizers.LossScaleOptimizer.__init__)


def wrap_configurations(wrap_writing: Wrap, wrap_reading: Wrap) -> None:
    """Replace what writes the configuration of an object, and what makes an object of one.

    Every object, on every way, is written and made by these two functions of `serialization_lib`. Its writer looks
    the first up in its module; other modules of Keras import the second by name.
    """
    read = serialization_lib.deserialize_keras_object
    wrapped = wrap_reading(read)
    serialization_lib.get_build_and_compile_config = wrap_writing(serialization_lib.get_build_and_compile_config)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "keras" and vars(module).get(read.__name__) is read:
            setattr(module, read.__name__, wrapped)


def fill_legacy_optimizers() -> None:
    """Give `keras.optimizers.legacy.Adam` and its kin Keras 3's meaning; as they come they only raise an error."""
    for module in (keras.optimizers.legacy, tf.keras.optimizers.legacy):
        for name in ("Adagrad", "Adam", "Ftrl", "Optimizer", "RMSprop", "SGD"):
            setattr(module, name, getattr(keras.optimizers, name))
