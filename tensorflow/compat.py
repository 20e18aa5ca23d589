"""Internals of TensorFlow and Keras on which allstep depends; `tests/tensorflow/test_compat.py` tests each.

The libraries do not promise any of this; it was checked for TensorFlow 2.21, and Keras 3.12 and 3.15. In addition,
`drop_in.optimizer` overrides `_clip_gradients`, and `optimizers.base` `_apply_weight_decay` and `_backend_update_step`.
"""

import collections
import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import h5py
import keras
import tensorflow as tf
from keras.src.backend import compute_output_spec
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import nn
from keras.src.legacy.saving.legacy_h5_format import load_optimizer_weights_from_hdf5_group
from keras.src.losses import loss as losses
from keras.src.random.seed_generator import global_seed_generator as global_seed_generator
from keras.src.saving import serialization_lib
from keras.src.utils.naming import to_snake_case as to_snake_case
from tensorflow.python.eager.context import anonymous_name
from tensorflow.python.framework import random_seed
from tensorflow.python.ops import control_flow_util

MULTI_OPTIMIZER: Any = getattr(keras.optimizers, "MultiOptimizer", ())
"""Keras' `MultiOptimizer`, for `isinstance`; none before Keras 3.13, the newest of which for Python 3.10 is 3.12."""


def is_in_xla() -> bool:
    """Return whether XLA compiles the code that is being traced; TensorFlow has this function for its loops."""
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def momentary_variable(value: tf.Tensor) -> tf.Tensor:
    """Return the handle of a new variable with this value, for kernels that update variables. It owns the variable.

    The name is the one of eager variables, so each execution creates a separate variable. XLA does not support it.
    """
    handle = tf.raw_ops.VarHandleOp(dtype=value.dtype, shape=value.shape, shared_name=anonymous_name())
    tf.raw_ops.AssignVariableOp(resource=handle, value=value)
    return handle


def number_in_graph(name: str) -> int:
    """Return how often this was called before for `name` in the graph being traced; 0 in eager execution.

    The number is the same on all ranks, and distinguishes the calls of a shared layer.
    """
    if tf.executing_eagerly():
        return 0
    graph = cast("Any", tf.compat.v1.get_default_graph())
    graph._allstep_numbers = numbers = getattr(graph, "_allstep_numbers", collections.Counter())
    numbers[name] += 1
    return numbers[name] - 1


def in_training(model: keras.Model) -> dict[str, bool]:
    """Return the flag with which `fit` calls a model: none, as in validation, if its `call` takes no `training`."""
    return {"training": True} if model._call_has_training_arg else {}


@contextlib.contextmanager
def noting_draws(found: list[Any]) -> Iterator[None]:
    """Note calls of tf.random in `found`: its operations ask `get_seed` for theirs, and keep their state themselves."""
    get_seed = random_seed.get_seed
    random_seed.get_seed = lambda seed: found.append(seed) or get_seed(seed)
    try:
        yield
    finally:
        random_seed.get_seed = get_seed


def take_seed_generator(generator: keras.random.SeedGenerator) -> None:
    """Make a generator the global one of this thread: Keras has one a thread, and tf.distribute a thread a device."""
    global_state.set_global_attribute("global_seed_generator", generator)


def trained_variables(optimizer: keras.Optimizer) -> list[Any]:
    """Return the variables for which the optimizer was built, in the order of its slots: `_trainable_variables`."""
    return optimizer._trainable_variables


def parts(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """Return the optimizers inside a `MultiOptimizer`, or the optimizer itself."""
    return optimizer.optimizers if isinstance(optimizer, MULTI_OPTIMIZER) else [optimizer]


def leave_gradients_as_they_are(optimizer: keras.Optimizer) -> None:
    """Make `apply` accept gradients that are already summed over the replicas of tf.distribute.

    A Keras optimizer adds them up itself, in `_all_reduce_sum_gradients`.
    """
    for part in parts(optimizer):
        part._all_reduce_sum_gradients = lambda pairs: pairs  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def undivided_losses() -> Iterator[None]:
    """Keep Keras' losses from dividing by the number of replicas, which they do in tf.distribute for Keras' `fit`.

    Replicas are threads that take turns, so enter this once around all of them.
    """
    divide, losses.scale_loss_for_distribution = losses.scale_loss_for_distribution, lambda value: value
    try:
        yield
    finally:
        losses.scale_loss_for_distribution = divide


def take_new_collective_keys() -> None:
    """Give the next MirroredStrategy new collective keys, for which TensorFlow remembers no shapes of tensors."""
    tf.distribute.MirroredStrategy._collective_key_base += 10**5


def variable_index(optimizer: keras.Optimizer, variable: Any) -> int:
    """Return the index of a Keras or TensorFlow variable in `trained_variables`: `_get_variable_index`."""
    return optimizer._get_variable_index(variable)


def accumulated_gradients(optimizer: keras.Optimizer) -> list[Any]:
    """Return the variables in which the optimizer accumulates gradients: `_accumulated_gradients`, if it has them."""
    return [variable for variable in getattr(optimizer, "_accumulated_gradients", ()) if variable is not None]


def rmsprop_momentums(optimizer: keras.optimizers.RMSprop) -> Sequence[Any]:
    """Return the slots of the velocity, which contains the learning rate: `_momentums`, empty without momentum."""
    return optimizer._momentums


def layers_of(model: keras.Model) -> Iterable[keras.layers.Layer]:
    """Return the model and all layers in it, at any depth: `_flatten_layers`; `model.layers` has only the outermost."""
    return model._flatten_layers()


def build_symbolically(model: keras.Model, iterator: Any) -> None:
    """Create a model's weights as Keras does in its first call, for the batches of an iterator of `fit`.

    This calls its `build`, or runs `call` symbolically, which the first call then does not repeat. The shapes come from
    the iterator's `_distributed_dataset`, so no batch is read.
    """
    x, _, _ = keras.utils.unpack_x_y_sample_weight(iterator._distributed_dataset.element_spec)
    if type(model).build is not keras.Model.build and not model.built:
        model.build(tf.nest.map_structure(lambda spec: tuple(spec.shape), x))
    if all(layer.built for layer in model._layers):
        return
    symbols = tf.nest.map_structure(
        lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name, sparse=isinstance(spec, tf.SparseTensorSpec)), x
    )
    compute_output_spec(model.call, symbols, **({"training": True} if model._call_has_training_arg else {}))


def is_recomputed(layer: keras.layers.Layer) -> bool:
    """Return whether a layer was made in a `keras.RematScope`, which has it computed again: `_remat_mode`."""
    return layer._remat_mode is not None


def layers_in_order(model: keras.Model) -> Sequence[keras.layers.Layer]:
    """Return the model and all layers in it, each before those in it, in the order in which they were called or set.

    `_layers` has the layers of attributes, and those of a graph, which have a node (`_inbound_nodes`) whose output
    Keras numbers.
    """

    def called(child: Any) -> int:
        outputs = [tensor for node in child._inbound_nodes[:1] for tensor in node.outputs[:1]]
        return int(re.sub(r"\D", "", outputs[0].name) or 0) if outputs else 0

    def add(layer: Any) -> None:
        if id(layer) not in found:
            found[id(layer)] = layer
            for child in sorted(layer._layers, key=called):
                add(child)

    found: dict[int, keras.layers.Layer] = {}
    add(model)
    return list(found.values())


def pickled_as(kind: type, reduced: tuple) -> tuple:
    """Return the result of `__reduce__` of an object of a subclass of `kind`, changed to name `kind`.

    Keras pickles objects as `_unpickle_model`, a method of their class, with the archive as arguments.
    """
    _, arguments = reduced
    return kind._unpickle_model, arguments  # pyright: ignore[reportAttributeAccessIssue]


def h5_optimizer_weights(file: h5py.File) -> list[Any]:
    """Return the optimizer's variables in the .h5 file of a model, in the optimizer's order."""
    return load_optimizer_weights_from_hdf5_group(file)


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes a function and returns its replacement."""


def wrapper(function: Callable[..., Any]) -> Wrap:
    """Return what replaces a function by `function`, which gets the replaced one before the arguments of a call."""

    def wrap(replaced: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(replaced)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(replaced, *args, **kwargs)

        return replacement

    return wrap


def wrap_model_method(name: str, wrap: Wrap) -> None:
    """Replace a method of `keras.Model` in the class that defines it, Keras' base class Trainer.

    Keras calls `make_train_function` at the start of each `fit` and `train_on_batch`.
    """
    owner = next(kind for kind in keras.Model.__mro__ if name in vars(kind))
    setattr(owner, name, wrap(getattr(owner, name)))


def wrap_loss_scaling(wrap: Wrap) -> None:
    """Replace the `__init__` of `LossScaleOptimizer`, which Keras creates under the mixed_float16 policy."""
    keras.optimizers.LossScaleOptimizer.__init__ = wrap(keras.optimizers.LossScaleOptimizer.__init__)


def wrap_configurations(wrap_writing: Wrap, wrap_reading: Wrap) -> None:
    """Replace the functions that write the configuration of an object, and that create an object from one.

    Keras writes and creates all objects by these two functions of `serialization_lib`. It looks up the first in that
    module; other modules of Keras import the second by name.
    """
    read = serialization_lib.deserialize_keras_object
    wrapped = wrap_reading(read)
    serialization_lib.get_build_and_compile_config = wrap_writing(serialization_lib.get_build_and_compile_config)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "keras" and vars(module).get(read.__name__) is read:
            setattr(module, read.__name__, wrapped)


def fill_legacy_optimizers() -> None:
    """Replace `keras.optimizers.legacy.Adam` etc., which only raise an error in Keras 3, by Keras 3's optimizers."""
    for module in (keras.optimizers.legacy, tf.keras.optimizers.legacy):
        for name in ("Adagrad", "Adam", "Ftrl", "Optimizer", "RMSprop", "SGD"):
            setattr(module, name, getattr(keras.optimizers, name))


def wrap_synchronised_moments(wrap: Wrap) -> None:
    """Replace the function by which `BatchNormalization(synchronized=True)` computes mean and variance."""
    nn._compute_moments_sync = wrap(nn._compute_moments_sync)


def wrap_masked_moments(wrap: Wrap) -> None:
    """Replace the method by which `BatchNormalization` computes mean and variance, with a mask or without."""
    keras.layers.BatchNormalization._moments = wrap(keras.layers.BatchNormalization._moments)
