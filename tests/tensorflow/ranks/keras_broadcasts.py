"""Cases: all ranks get one rank's variables, at the start or on demand; other collectives."""

import keras
import numpy as np
import tensorflow as tf
from keras import optimizers
from keras_cases import DIRECTORY, case, compiled, fit, network, samples, values

import allstep.tensorflow.horovod_keras as hvd


@case
def broadcast_variables():
    dtypes = ["float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "bool"]
    dtypes += ["uint32", "int8", "uint16"]
    native = [tf.Variable(tf.cast(tf.fill((2, 3), hvd.rank() + 1), dtype)) for dtype in dtypes]
    scalar, empty = keras.Variable(float(hvd.rank())), tf.Variable(tf.zeros((0, 3)))
    model = network(seed=hvd.rank())
    hvd.broadcast_variables([*native, scalar, empty, *model.variables], root_rank=1)

    @tf.function
    def inside():
        hvd.broadcast_variables([scalar], root_rank=0)

    scalar.assign(hvd.rank() + 5.0)
    inside()
    expected = values(network(seed=1).variables)
    return {
        "native": [float(tf.reduce_mean(tf.cast(v, tf.float32))) for v in native],
        "model": values(model.variables) == expected,
        "inside": float(scalar),
    }


@case
def broadcast_global_variables():
    models = [compiled(hvd.DistributedOptimizer(optimizers.Adam(0.1 * (hvd.rank() + 1))), seed=hvd.rank())]
    hvd.broadcast_global_variables(1)
    return {
        "weights": values(models[0].weights) == values(network(seed=1).weights),
        "learning_rate": float(models[0].optimizer.learning_rate),
    }


@case
def broadcast_loaded_model():
    """Rank 0 loads a trained model; rank 1 has a new one, which its first batch builds (Horovod's recipe)."""
    path = DIRECTORY / "broadcast.keras"
    layers = [keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(3)]
    if hvd.rank() == 0:
        saved = keras.Sequential([keras.Input((4,)), *layers])
        saved.compile(optimizers.Adam(0.02), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        fit(saved)
        saved.save(path)
        model = hvd.load_model(path)
    else:
        model = keras.Sequential(layers)
        optimizer = hvd.DistributedOptimizer(optimizers.Adam(0.5))
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    fit(model, hvd.callbacks.BroadcastGlobalVariablesCallback(0))
    return {
        "state": values(model.weights) + values(model.optimizer.variables),
        "iterations": int(model.optimizer.iterations),
    }


@case
def broadcast_leaves_a_gradient_in_the_making():
    """A step takes 2 of 3 batches, so the second `fit` starts in mid-step. Oracle: whole batches in one process."""

    def trained(optimizer, x, y, *callbacks):
        model = compiled(optimizer)
        for _ in range(2):
            model.fit(x, y, len(x) // 3, 1, 0, [*callbacks], shuffle=False)
        return np.concatenate([np.ravel(v) for v in model.weights])

    batches = [[a.reshape(4, 8, -1)[:3] for a in samples(seed=rank)] for rank in range(hvd.size())]
    whole = [np.concatenate(parts, axis=1).reshape(48, -1) for parts in zip(*batches, strict=True)]
    mine = [a.reshape(24, -1) for a in batches[hvd.rank()]]
    expected = trained(optimizers.SGD(0.5, gradient_accumulation_steps=2), *whole)
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(0.5, gradient_accumulation_steps=2))
    return float(np.abs(trained(optimizer, *mine, hvd.callbacks.BroadcastGlobalVariablesCallback(0)) - expected).max())


@case
def broadcast_keeps_local_variables():
    model = compiled(hvd.DistributedOptimizer(optimizers.SGD(0.0)), seed=hvd.rank())
    before = values(model.weights[:1])
    fit(model, hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=model.weights[0]))
    return {"kept": values(model.weights[:1]) == before, "others": values(model.weights[1:])}


@case
def collectives():
    rank = hvd.rank()
    return {
        "average": float(hvd.allreduce(float(rank))),
        "sum": np.asarray(hvd.allreduce(np.array([rank, 1.0]), op=hvd.Sum)).tolist(),
        "variable": float(hvd.allreduce(keras.Variable(float(rank)))),
        "allgather": np.asarray(hvd.allgather(np.array([[rank]] * (rank + 1)))).ravel().tolist(),
        "broadcast": np.asarray(hvd.broadcast([rank, 7], 1)).tolist(),
        "reducescatter": np.asarray(hvd.reducescatter(np.array([1.0, 2.0]) * (rank + 1), op=hvd.Sum)).tolist(),
        "object": hvd.broadcast_object({"rank": rank}, 1),
        "built": hvd.mpi_built() or hvd.gloo_built(),
    }
