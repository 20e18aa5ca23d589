"""A model with a distributed optimizer is saved, loaded and trained on; the optimizer keeps its state and its class."""

import keras
import numpy as np
from keras import optimizers
from keras_cases import DIRECTORY, case, compiled, fit, values

import allstep.tensorflow.horovod_keras as hvd
import tensorflow as tf


@keras.saving.register_keras_serializable("test")
class Registered(optimizers.SGD):
    """A user's own optimizer that Keras knows by name."""


class Unregistered(optimizers.SGD):
    """A user's own optimizer that load_model is told of."""


def saved_and_loaded(optimizer, suffix, seed=None, **options) -> dict:
    """Train, save on rank 0, load on all, train the original and the loaded one on; they must agree."""
    path = DIRECTORY / f"{optimizer.name}{suffix}"
    model = compiled(optimizer)
    fit(model, seed=seed)
    if hvd.rank() == 0:
        model.save(path)
    hvd.allreduce(0.0, name="saved")
    loaded = hvd.load_model(path, **options)
    state = [values(m.weights) + values(m.optimizer.variables) for m in (model, loaded)]
    if seed is not None:  # the optimizer is a plain one: only now do the ranks train together
        hvd.DistributedOptimizer(model.optimizer)
        model.compile(model.optimizer, model.loss, run_eagerly=True)
    for m in (model, loaded):
        fit(m)
    return {
        "type": type(loaded.optimizer).__name__,
        "state": state[0] == state[1],
        "continued": np.allclose(
            *[np.concatenate([np.ravel(v) for v in values(m.weights)]) for m in (model, loaded)], rtol=0, atol=1e-7
        ),
        "weights": values(loaded.weights),
        "config": loaded.optimizer.get_config() == model.optimizer.get_config(),
    }


@case
def save_keras_format():
    optimizer = optimizers.Adam(0.01, clipnorm=0.1, name="keras-format")
    return saved_and_loaded(hvd.DistributedOptimizer(optimizer), ".keras")


@case
def save_h5_format():
    return saved_and_loaded(hvd.DistributedOptimizer(optimizers.Adam(0.01, name="h5-format")), ".h5")


@case
def save_h5_loss_scale():
    inner = optimizers.SGD(0.1, momentum=0.5)
    return saved_and_loaded(
        hvd.DistributedOptimizer(optimizers.LossScaleOptimizer(inner, 8.0, name="h5-loss-scale")), ".h5"
    )


@case
def save_plain():
    """Saved without Horovod, by ranks that have seen the same samples."""
    return saved_and_loaded(optimizers.Adam(0.01, name="plain"), ".keras", seed=0)


@case
def save_registered():
    return saved_and_loaded(hvd.DistributedOptimizer(Registered(0.1, momentum=0.5, name="registered")), ".keras")


@case
def save_unregistered():
    optimizer = hvd.DistributedOptimizer(Unregistered(0.1, name="unregistered"))
    return saved_and_loaded(optimizer, ".keras", custom_optimizers=[Unregistered])


@case
def save_loss_scale():
    inner = hvd.DistributedOptimizer(optimizers.Adam(0.01))
    return saved_and_loaded(optimizers.LossScaleOptimizer(inner, 8.0, name="loss-scale"), ".keras")


@case
def save_accumulation():
    optimizer = optimizers.Adam(0.01, name="accumulation")
    optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2, average_aggregated_gradients=True)
    return saved_and_loaded(optimizer, ".keras")


@case
def load_without_horovod():
    """A model saved with a distributed optimizer is a plain Keras model."""
    model = compiled(hvd.DistributedOptimizer(optimizers.Adam(0.01)))
    fit(model)
    path = DIRECTORY / f"without-{hvd.rank()}.keras"
    model.save(path)
    optimizer = keras.models.load_model(path).optimizer
    serialized = optimizers.serialize(model.optimizer)
    return {
        "is_plain": type(optimizer) is optimizers.Adam,
        "state": values(optimizer.variables) == values(model.optimizer.variables),
        "serialized": [serialized["module"], serialized["class_name"]],
    }


@case
def from_config():
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(0.1, momentum=0.5), op=hvd.Sum)
    again = type(optimizer).from_config(optimizer.get_config())
    variable = keras.Variable([0.0])
    again.apply([tf.constant([float(hvd.rank() + 1)])], [variable])
    return values([variable])[0]


@case
def state_survives_wrapping():
    """What a configuration does not hold: slots, exclusions, a learning rate that is a function."""
    variables = [keras.Variable([1.0], name="kernel"), keras.Variable([1.0], name="bias")]
    optimizer = optimizers.AdamW(lambda: 0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.apply([tf.constant([1.0])] * 2, variables)
    before = values(optimizer.variables)
    wrapped = hvd.DistributedOptimizer(optimizer)
    same = values(wrapped.variables) == before
    wrapped.apply([tf.constant([0.0])] * 2, variables)
    return {"same": same, "decayed": values(variables), "callable": len(wrapped.variables()) == len(before)}
