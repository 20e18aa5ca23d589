"""Cases that save, load and resume a model with a distributed optimizer, which keeps its state and its class."""

import copy
import os
import pickle
import subprocess
import sys

import keras
import numpy as np
import tensorflow as tf
from keras import optimizers
from keras_cases import DIRECTORY, case, compiled, error, fit, network, values

import allstep.tensorflow.horovod_keras as hvd


@keras.saving.register_keras_serializable("test")
class Registered(optimizers.SGD):
    """User's optimizer that is registered with Keras."""


class Unregistered(optimizers.SGD):
    """User's optimizer that is passed to load_model."""


def saved_and_loaded(optimizer, suffix, seed=None, **options) -> dict:
    """Train, save on rank 0, load on all ranks, continue with the original and the loaded model, and compare them."""
    path = DIRECTORY / f"{optimizer.name}{suffix}"
    model = compiled(optimizer)
    fit(model, seed=seed)
    if hvd.rank() == 0:
        model.save(path)
    hvd.allreduce(0.0, name="saved")
    loaded = hvd.load_model(path, **options)
    state = [values(m.weights) + values(m.optimizer.variables) for m in (model, loaded)]
    if seed is not None:  # the optimizer was plain, so distribute it now
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
    """Save without Horovod, on ranks that have trained on the same samples."""
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
def save_accumulated_sum():
    optimizer = optimizers.SGD(0.1, name="accumulated-sum")
    return saved_and_loaded(hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2), ".keras")


@case
def save_h5_accumulated_sum():
    """An .h5 file does not record whether the sum or the mean was applied."""
    optimizer = optimizers.SGD(0.1, name="h5-accumulated-sum")
    optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2)
    result = saved_and_loaded(optimizer, ".h5", backward_passes_per_step=2)
    return {**result, "ambiguous": error(hvd.load_model, DIRECTORY / f"{optimizer.name}.h5")}


@case
def load_without_horovod():
    """Load each rank's file, saved with a distributed optimizer, as a plain Keras model without importing Horovod."""
    model = compiled(hvd.DistributedOptimizer(optimizers.Adam(0.01), backward_passes_per_step=2))
    fit(model)
    model.save(DIRECTORY / f"without-{hvd.rank()}.keras")
    states = hvd.allgather_object(sum(abs(v.numpy()).sum() for v in [*model.weights, *model.optimizer.variables]))
    if hvd.rank():
        return None
    program = """
import sys, keras
for path in sys.argv[1:]:
    model = keras.models.load_model(path)
    assert type(model.optimizer) is keras.optimizers.Adam, type(model.optimizer)
    print(float(sum(abs(v.numpy()).sum() for v in [*model.weights, *model.optimizer.variables])))
assert not any(name.startswith(("horovod", "allstep")) for name in sys.modules)
"""
    cold = {**os.environ, "WARM_FOLDER": ""}  # a fork would have imported Horovod
    command = [sys.executable, "-c", program, *(DIRECTORY / f"without-{rank}.keras" for rank in range(hvd.size()))]
    run = subprocess.run(command, capture_output=True, text=True, env=cold)
    assert run.returncode == 0, run.stderr
    return bool(np.allclose([float(line) for line in run.stdout.split()], states))


@case
def stays_distributed():
    """However Keras recreates an optimizer, it must sum 1 and 2 in half precision and step by 0.1 of the sum."""
    optimizer = hvd.DistributedOptimizer(
        optimizers.SGD(0.1), op=hvd.Sum, compression=hvd.Compression.fp16, name="mine", sparse_as_dense=True
    )
    model = compiled(optimizer)
    path = DIRECTORY / f"stays-{hvd.rank()}.keras"
    model.save(path)
    compiled_again = network()
    compiled_again.compile_from_config(model.get_compile_config())
    serialized = keras.saving.serialize_keras_object(optimizer)
    ways = {
        "load_model": keras.models.load_model(path).optimizer,
        "our load_model": hvd.load_model(path).optimizer,
        "compile_from_config": compiled_again.optimizer,
        "deepcopy": copy.deepcopy(optimizer),
        "deepcopy of the model": copy.deepcopy(model).optimizer,
        "pickle": pickle.loads(pickle.dumps(optimizer)),
        "pickle of the model": pickle.loads(pickle.dumps(model)).optimizer,
        "serialize": optimizers.deserialize(optimizers.serialize(optimizer)),
        "get": optimizers.get(optimizers.serialize(optimizer)),
        "deserialize_keras_object": keras.saving.deserialize_keras_object(serialized),
        "twice": copy.deepcopy(copy.deepcopy(optimizer)),
        "from_config": type(optimizer).from_config(optimizer.get_config()),
    }
    changes = {}
    for way, made in ways.items():
        variable = keras.Variable([0.0])
        made._trainable_variables, made.built = [], False  # to apply it to another variable
        made.apply([tf.constant([float(hvd.rank() + 1)])], [variable])
        changes[way] = values([variable])[0][0]
    plain = copy.deepcopy(optimizers.SGD(0.1))
    return {"changes": changes, "options": serialized["horovod"], "plain stays plain": type(plain) is optimizers.SGD}


@case
def refuses_what_was_not_saved():
    """A process set, a list of groups, local variables and a custom compression are not in the file."""
    model = network()
    one = hvd.add_process_set([0])
    fp16 = hvd.Compression.fp16
    lost = {
        "process_set": hvd.DistributedOptimizer(optimizers.SGD(0.1), process_set=one),
        "groups": hvd.DistributedOptimizer(optimizers.SGD(0.1), groups=[[model.weights[0]]]),
        "compression": hvd.DistributedOptimizer(optimizers.SGD(0.1), compression=type("Mine", (fp16,), {})),
        "local variables": hvd.PartialDistributedOptimizer(optimizers.SGD(0.1), local_layers=model.layers[0]),
    }
    refused, wrapped = {}, {}
    for name, optimizer in lost.items():
        path = DIRECTORY / f"{name}-{hvd.rank()}.keras"
        compiled(optimizer).save(path)
        loaded = keras.models.load_model(path)
        loaded.evaluate(np.zeros((1, 4)), np.zeros(1), verbose=0)
        refused[name] = error(fit, loaded)
        loaded.compile(hvd.DistributedOptimizer(loaded.optimizer), loaded.loss, run_eagerly=True)
        wrapped[name] = error(fit, loaded, hvd.callbacks.BroadcastGlobalVariablesCallback(0))
    given = hvd.load_model(DIRECTORY / f"process_set-{hvd.rank()}.keras", process_set=hvd.global_process_set)
    refused["misspelt"] = error(hvd.load_model, DIRECTORY / f"groups-{hvd.rank()}.keras", groups=1, compresion=fp16)
    hvd.remove_process_set(one)
    copied = type(lost["local variables"]).from_config(lost["local variables"].get_config())
    refused["from_config"] = error(copied.apply, [tf.ones(1)], [keras.Variable([0.0])])
    serialized = optimizers.serialize(hvd.DistributedOptimizer(optimizers.SGD(0.1)))
    for number, entry in enumerate(["text", {"op": "sum"}, {**serialized["horovod"], "op": "max"}]):
        made = optimizers.deserialize({**serialized, "horovod": entry})
        refused[f"entry {number}"] = error(made.apply, [tf.ones(1)], [keras.Variable([0.0])])
    return {"refused": refused, "wrapped": wrapped, "given": error(fit, given, hvd.callbacks.MetricAverageCallback())}


@case
def from_config():
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(0.1, momentum=0.5), op=hvd.Sum)
    again = type(optimizer).from_config(optimizer.get_config())
    variable = keras.Variable([0.0])
    again.apply([tf.constant([float(hvd.rank() + 1)])], [variable])
    return values([variable])[0]


@case
def state_survives_wrapping():
    """Keep state that a configuration does not contain: slots, exclusions, a learning rate that is a function."""
    variables = [keras.Variable([1.0], name="kernel"), keras.Variable([1.0], name="bias")]
    optimizer = optimizers.AdamW(lambda: 0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.apply([tf.constant([1.0])] * 2, variables)
    before = values(optimizer.variables)
    wrapped = hvd.DistributedOptimizer(optimizer)
    same = values(wrapped.variables) == before
    wrapped.apply([tf.constant([0.0])] * 2, variables)
    return {"same": same, "decayed": values(variables), "callable": len(wrapped.variables()) == len(before)}
