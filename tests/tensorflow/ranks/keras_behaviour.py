"""Runs on every rank of test_horovod_keras.py: what is not "train and compare with a single process".

Usage: horovodrun -np 2 python keras_behaviour.py DIRECTORY. Each rank writes DIRECTORY/rank{r}.json: the value that
each function named in CASES returned.
"""

import json
import sys
import warnings
from pathlib import Path

import keras
import numpy as np

import allstep.tensorflow.horovod_keras as hvd
import tensorflow as tf

optimizers = keras.optimizers
DIRECTORY = Path(sys.argv[1])
CASES = []


def case(function):
    CASES.append(function)
    return function


def network(*, seed: int = 0, units: int = 3) -> keras.Model:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(5, activation="tanh", name="hidden"), keras.layers.Dense(units, name="logits")]
    return keras.Sequential([keras.Input((4,)), *layers])


def compiled(optimizer, *, seed: int = 0, run_eagerly: bool = True, **options) -> keras.Model:
    """Eager by default: at this size, tracing a graph takes longer than the few steps. keras_numerics.py traces."""
    model = network(seed=seed)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, run_eagerly=run_eagerly, **options)
    return model


def samples(*, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(32, 4)).astype(np.float32), rng.integers(0, 3, size=32)


def fit(model, *callbacks, epochs=1, seed=None, **options):
    """Fit on this rank's own samples, or on those of a seed."""
    x, y = samples(seed=hvd.rank() if seed is None else seed)
    return model.fit(x, y, 8, epochs, 0, [*callbacks], shuffle=False, **options)


def values(variables) -> list:
    return [np.asarray(getattr(v, "value", v), np.float64).tolist() for v in variables]


def error(function, *args, **options) -> str:
    try:
        function(*args, **options)
    except Exception as exception:
        return f"{type(exception).__name__}: {exception}"
    return "no error"


# --- the founder's loop: apply() inside a tf.function


@case
def custom_loop():
    model, optimizer = network(), hvd.DistributedOptimizer(optimizers.SGD(0.1, momentum=0.9))
    x, y = samples(seed=hvd.rank())

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    for start in range(0, 32, 8):
        step(x[start : start + 8], y[start : start + 8])
    collectives = [
        node.name
        for graph in [step.get_concrete_function(x[:8], y[:8]).graph]
        for node in graph.as_graph_def().node
        if node.op.startswith("Horovod")
    ]
    return {"weights": values(model.weights), "collectives": collectives}


@case
def horovods_own_wrapper():
    """The reason for this module: no error, and every rank trains by itself."""
    import horovod.tensorflow.keras as own

    model = compiled(own.DistributedOptimizer(optimizers.SGD(0.1)), run_eagerly=False)
    fit(model)
    return values(model.weights)


@case
def optimizer_without_horovod_name():
    """A rank that has built more models has other names; the collectives must still meet."""
    for _ in range(hvd.rank() * 3):
        compiled(optimizers.Adam())
    optimizer = hvd.DistributedOptimizer(optimizers.Adam(gradient_accumulation_steps=2))
    model = compiled(optimizer, seed=hvd.rank(), run_eagerly=False)
    fit(model, hvd.callbacks.BroadcastGlobalVariablesCallback(0))
    return {"weights": values(model.weights), "name": model.optimizer.name}


# --- loss scaling


def loss_scale_after(wrap) -> dict:
    """Rank 1 alone has a NaN in the second of four batches."""
    model = compiled(wrap(), run_eagerly=False)
    x, y = samples(seed=hvd.rank())
    if hvd.rank() == 1:
        x[8] = np.nan
    model.fit(x, y, 8, verbose=0, shuffle=False)
    optimizer = model.optimizer
    return {
        "scale": float(optimizer.dynamic_scale),
        "iterations": int(optimizer.iterations),
        "weights": values(model.weights),
        "types": [type(optimizer).__name__, type(optimizer.inner_optimizer).__name__],
    }


@case
def non_finite_inside():
    return loss_scale_after(lambda: hvd.DistributedOptimizer(optimizers.LossScaleOptimizer(optimizers.SGD(0.1), 8.0)))


@case
def non_finite_outside():
    return loss_scale_after(lambda: optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(optimizers.SGD(0.1)), 8.0))


@case
def non_finite_with_accumulation():
    inner = optimizers.SGD(0.1, gradient_accumulation_steps=2)
    return loss_scale_after(lambda: optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(inner), 8.0))


@case
def mixed_float16():
    """Keras itself puts LossScaleOptimizer around the optimizer."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return loss_scale_after(lambda: hvd.DistributedOptimizer(optimizers.SGD(0.1)))
    finally:
        keras.config.set_dtype_policy("float32")


# --- who reduces what


@case
def process_sets():
    """Each rank alone in its set: every rank trains as a single process on its own samples."""
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    mine = compiled(hvd.DistributedOptimizer(optimizers.SGD(0.1), process_set=sets[hvd.rank()]))
    others = compiled(hvd.DistributedOptimizer(optimizers.SGD(0.1), process_set=sets[0]))
    plain = compiled(optimizers.SGD(0.1))
    for model in (mine, others, plain):
        fit(model)
    for process_set in sets:
        hvd.remove_process_set(process_set)
    return {"mine": values(mine.weights), "others": values(others.weights), "plain": values(plain.weights)}


@case
def local_layer():
    model = network()
    optimizer = hvd.PartialDistributedOptimizer(optimizers.SGD(0.1), local_layers=model.layers[-1])
    gradient = float(hvd.rank() + 1)
    before = values(model.trainable_variables)
    optimizer.apply([tf.fill(v.shape, gradient) for v in model.trainable_variables], model.trainable_variables)
    change = [np.subtract(b, a).mean() for a, b in zip(before, values(model.trainable_variables), strict=True)]
    refused = error(
        hvd.PartialDistributedOptimizer, optimizers.SGD(0.1, global_clipnorm=1.0), local_layers=model.layers[-1]
    )
    return {"change": change, "refused": refused}


@case
def listed_groups():
    model = network()
    groups = [[model.weights[0], model.weights[3]], [model.weights[1].value]]
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(0.1), groups=groups)
    apply = tf.function(lambda grads: optimizer.apply(grads, model.trainable_variables))
    grads = [tf.fill(v.shape, float(hvd.rank() + 1)) for v in model.trainable_variables]
    before = values(model.trainable_variables)
    apply(grads)
    change = [np.subtract(b, a).mean() for a, b in zip(before, values(model.trainable_variables), strict=True)]
    nodes = apply.get_concrete_function(grads).graph.as_graph_def().node
    sizes = [len(node.input) for node in nodes if node.op == "HorovodGroupedAllreduce"]
    return {"change": change, "sizes": sizes}


@case
def multi_optimizer():
    model = network()
    rates = optimizers.OptimizerMap(optimizers.SGD(0.1), {".*hidden.*": optimizers.Adam(0.1)})
    optimizer = hvd.DistributedOptimizer(optimizers.MultiOptimizer(rates))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    fit(model)
    return values(model.weights)


@case
def adasum():
    if not hvd.mpi_enabled():
        return error(hvd.DistributedOptimizer, optimizers.SGD(), op=hvd.Adasum)
    variable = keras.Variable([0.0, 0.0])
    gradient = [[1.0, 2.0], [3.0, -1.0]][hvd.rank()]
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(1.0), op=hvd.Adasum)
    optimizer.apply([tf.constant(gradient)], [variable])
    return values([variable])[0]


def different_models() -> str:
    models = [compiled(hvd.DistributedOptimizer(optimizers.SGD())) for _ in range(hvd.rank() + 1)]
    return error(hvd.broadcast_global_variables, 0) if models else ""


@case
def refusals():
    optimizer = optimizers.SGD()
    wrap = hvd.DistributedOptimizer
    built = optimizers.SGD()
    built.build([keras.Variable([1.0])])
    model = network()
    grads = [tf.ones(v.shape) for v in model.trainable_variables]
    distributed = wrap(optimizers.SGD())
    jitted = tf.function(lambda: distributed.apply(grads, model.trainable_variables), jit_compile=True)
    stateless = wrap(optimizers.SGD())
    stateless.build(model.trainable_variables)
    return {
        "twice": error(wrap, wrap(optimizers.SGD())),
        "not an optimizer": error(wrap, "sgd"),
        "op": error(wrap, optimizer, op=hvd.Min),
        "predivide": error(wrap, optimizer, op=hvd.Sum, gradient_predivide_factor=2.0),
        "groups": error(wrap, optimizer, groups=0),
        "passes": error(wrap, optimizer, backward_passes_per_step=0),
        "passes twice": error(wrap, optimizers.SGD(gradient_accumulation_steps=2), backward_passes_per_step=3),
        "passes after build": error(wrap, built, backward_passes_per_step=2),
        "unknown option": error(wrap, optimizer, compresion=hvd.Compression.fp16),
        "xla": error(jitted),
        "xla in fit": error(fit, compiled(wrap(optimizers.SGD()), jit_compile=True, run_eagerly=False)),
        "stateless": error(stateless.stateless_apply, stateless.variables, grads, model.trainable_variables),
        "legacy": error(hvd.load_model, "nowhere.keras", legacy_opts=True),
        "global variables": error(hvd.broadcast_global_variables, 0),
        "global variables differ": different_models(),
        "still plain": type(optimizer) is optimizers.SGD,
    }


@case
def compile_options():
    """What Horovod's examples pass to compile, and what "auto" becomes."""
    model = compiled(hvd.DistributedOptimizer(optimizers.SGD()), run_eagerly=False, experimental_run_tf_function=False)
    other = error(compiled, optimizers.SGD(), experimental_run_tf_function=False)
    legacy = [keras.optimizers.legacy.Adam is optimizers.Adam, tf.keras.optimizers.legacy.SGD is optimizers.SGD]
    return {"jit_compile": model.jit_compile, "other": other, "legacy": legacy}


# --- saving


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


# --- broadcast and collectives


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
    """Rank 0 loads a trained model, the other has a new one that its first batch builds (Horovod's recipe)."""
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


# --- the other callbacks


class Record(keras.callbacks.Callback):
    """What a callback after Horovod's sees."""

    def __init__(self):
        super().__init__()
        self.logs, self.rates = [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.rates.append(float(self.model.optimizer.learning_rate))

    def on_epoch_end(self, epoch, logs=None):
        self.logs.append(dict(logs))


@case
def metric_average():
    before, after = Record(), Record()
    model = compiled(hvd.DistributedOptimizer(optimizers.SGD(0.1)), metrics=["accuracy"])
    history = fit(model, before, hvd.callbacks.MetricAverageCallback(), after, validation_data=samples(seed=hvd.rank()))
    return {
        "before": before.logs,
        "after": after.logs,
        "history": {name: values[0] for name, values in history.history.items()},
    }


@case
def warmup():
    record = Record()
    model = compiled(hvd.DistributedOptimizer(optimizers.SGD(0.4)))
    warm = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.4, warmup_epochs=2, verbose=1)
    history = fit(model, warm, record, epochs=3)
    return {"rates": record.rates, "lr": history.history["lr"]}


@case
def schedule():
    staircase, smooth, late = Record(), Record(), Record()
    callback = hvd.callbacks.LearningRateScheduleCallback
    fit(compiled(hvd.DistributedOptimizer(optimizers.SGD(1.0))), callback(1.0, 0.5), staircase, epochs=2)
    smoothly = callback(1.0, lambda epoch: 1.0 + epoch, staircase=False)
    fit(compiled(hvd.DistributedOptimizer(optimizers.Adam(1.0))), smoothly, smooth)
    lately = callback(1.0, lambda epoch: 0.1, start_epoch=1, end_epoch=2)
    fit(compiled(hvd.DistributedOptimizer(optimizers.SGD(1.0))), lately, late, epochs=2)
    unknown = callback(1.0, 0.5, staircase=False)
    unknown.set_params({"steps": None})
    return {
        "staircase": staircase.rates[::4],
        "smooth": smooth.rates,
        "late": late.rates[::4],
        "unknown": error(unknown.on_train_begin),
    }


@case
def momentum_correction():
    """A constant gradient of 1, momentum 0.5, the learning rate 1 then 0.1: the velocity shrinks with it."""
    changes = {}
    for momentum_correction in (True, False):
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), layer])
        optimizer = hvd.DistributedOptimizer(optimizers.SGD(1.0, momentum=0.5))
        model.compile(optimizer, loss=lambda y, p: p, run_eagerly=True)
        callback = hvd.callbacks.LearningRateScheduleCallback(1.0, 0.1, momentum_correction=momentum_correction)
        model.fit(np.ones((1, 1)), np.ones((1, 1)), 1, 2, 0, [callback])
        changes[str(momentum_correction)] = float(layer.kernel.numpy()[0, 0])
    return changes


@case
def best_model_checkpoint():
    path = DIRECTORY / f"best-{hvd.rank()}.keras"
    checkpoint = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    model = compiled(hvd.DistributedOptimizer(optimizers.SGD(0.1)))
    refused = error(fit, model, checkpoint)
    checkpoint.filepath = str(path)
    fit(model, hvd.callbacks.MetricAverageCallback(), checkpoint, epochs=2)
    weights = DIRECTORY / f"best-{hvd.rank()}.weights.h5"
    fit(model, hvd.callbacks.BestModelCheckpoint("loss", save_weights_only=True, filepath=str(weights)))
    return {"refused": refused, "written": [path.exists(), weights.exists()]}


def main() -> None:
    hvd.init(process_sets="dynamic")
    warnings.simplefilter("ignore")
    results = {}
    for function in CASES:
        print(function.__name__, file=sys.stderr, flush=True)
        keras.backend.clear_session()
        results[function.__name__] = function()
    (DIRECTORY / f"rank{hvd.rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
