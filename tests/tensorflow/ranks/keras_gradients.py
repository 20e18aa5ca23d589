"""Cases for the reduction of gradients: custom loops, loss scaling, process sets, groups, and errors."""

import keras
import numpy as np
import tensorflow as tf
from keras import optimizers
from keras_cases import case, compiled, error, fit, network, samples, values

import allstep.tensorflow.horovod_keras as hvd

# --- custom loop: apply() inside a tf.function


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
def loops_without_a_broadcast():
    """Ranks start from other weights: two steps in a loop, eager and as a graph."""
    told = []
    for as_graph in (False, True):
        keras.utils.set_random_seed(hvd.rank())
        model, optimizer = network(), hvd.DistributedOptimizer(optimizers.SGD(0.1), name=f"alone_{as_graph}")
        model.trainable_variables[0].assign_add(tf.fill(model.trainable_variables[0].shape, float(hvd.rank())))
        model.compile(optimizer, "sparse_categorical_crossentropy", run_eagerly=not as_graph)
        x, y = samples(seed=hvd.rank())
        model.train_on_batch(x[:8], y[:8])
        try:
            model.train_on_batch(x[:8], y[:8])
        except (RuntimeError, tf.errors.OpError) as error:
            told.append("before the second step; received others on rank 1 than on rank 0" in str(error))
    return told


@case
def horovods_own_wrapper():
    """Horovod's wrapper raises no error, and each rank trains independently: the reason for horovod_keras."""
    import horovod.tensorflow.keras as own

    model = compiled(own.DistributedOptimizer(optimizers.SGD(0.1)), run_eagerly=False)
    fit(model)
    return values(model.weights)


@case
def optimizer_without_horovod_name():
    """A rank that has built more models has different names, and the collectives must still match."""
    for _ in range(hvd.rank() * 3):
        compiled(optimizers.Adam())
    optimizer = hvd.DistributedOptimizer(optimizers.Adam(gradient_accumulation_steps=2))
    model = compiled(optimizer, seed=hvd.rank(), run_eagerly=False)
    fit(model, hvd.callbacks.BroadcastGlobalVariablesCallback(0))
    return {"weights": values(model.weights), "name": model.optimizer.name}


@case
def same_shapes_at_once():
    """Step two optimizers of the same class and shapes in nested `tf.function`s. Oracle: steps computed in NumPy."""
    size = 100_000  # large enough for both to be in flight at the same time
    grads = [tf.random.stateless_normal((size,), [hvd.rank(), i]) for i in range(2)]
    mean = [np.asarray(hvd.allreduce(grad)) for grad in grads]

    def trained(form: str) -> bool:
        variables = [keras.Variable(np.zeros(size, np.float32)) for _ in grads]
        both = [hvd.DistributedOptimizer(optimizers.SGD(1.0)) for _ in grads]
        for optimizer, variable in zip(both, variables, strict=True):
            optimizer.build([variable])
        first, second = (lambda i=i: both[i].apply([grads[i]], [variables[i]]) for i in range(2))
        if form != "inner second":
            first = tf.function(first)
        if form != "inner first":
            second = tf.function(second)

        @tf.function
        def step():
            if form == "in a loop":
                for _ in tf.range(1):
                    first()
                    second()
            elif form == "in a condition":
                if tf.equal(tf.size(grads[0]), size):
                    first()
                if tf.equal(tf.size(grads[1]), size):
                    second()
            else:
                first()
                second()

        for _ in range(3):
            step()
        return all(np.allclose(v, -3 * m, atol=1e-5) for v, m in zip(variables, mean, strict=True))

    return {form: trained(form) for form in ("both", "inner first", "inner second", "in a loop", "in a condition")}


# --- loss scaling


def loss_scale_after(wrap) -> dict:
    """Train with a NaN on rank 1, in the second of four batches."""
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
    """Keras wraps the optimizer in LossScaleOptimizer."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return loss_scale_after(lambda: hvd.DistributedOptimizer(optimizers.SGD(0.1)))
    finally:
        keras.config.set_dtype_policy("float32")


# --- process sets, local layers and groups


@case
def process_sets():
    """Each process set has one rank, which trains on its samples like a single process."""
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
def sparse_as_dense():
    """Adam gets the sum of an embedding's rows on any number of ranks. Oracle: one rank with the whole batch."""
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]

    def trained(process_set, rows):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Embedding(5, 4), keras.layers.Flatten(), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((4,), dtype="int32"), *layers])
        optimizer = hvd.DistributedOptimizer(optimizers.Adam(0.1), sparse_as_dense=True, process_set=process_set)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=True)
        rng = np.random.default_rng(0)
        for _ in range(4):
            x, y = rng.integers(0, 5, (16, 4)), rng.integers(0, 3, 16)
            model.train_on_batch(x[rows], y[rows])
        return np.concatenate([np.ravel(v) for v in model.weights])

    whole = trained(sets[hvd.rank()], slice(None))
    shared = trained(hvd.global_process_set, slice(8 * hvd.rank(), 8 * hvd.rank() + 8))
    for process_set in sets:
        hvd.remove_process_set(process_set)
    return float(np.abs(whole - shared).max())


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
    sizes = [
        sum(not name.startswith("^") for name in node.input) for node in nodes if node.op == "HorovodGroupedAllreduce"
    ]
    return {"change": change, "sizes": sizes}


@case
def multi_optimizer():
    model = network()
    rates = optimizers.OptimizerMap(optimizers.SGD(0.1), {".*hidden.*": optimizers.Adam(0.1)})
    optimizer = hvd.DistributedOptimizer(optimizers.MultiOptimizer(rates))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    fit(model, hvd.callbacks.MetricAverageCallback())
    inside = hvd.DistributedOptimizer(optimizers.Adam(0.1))
    inside = optimizers.MultiOptimizer(optimizers.OptimizerMap(inside))
    twice = error(hvd.DistributedOptimizer, inside)
    other = compiled(inside)
    fit(other, hvd.callbacks.MetricAverageCallback())
    return {"weights": values(model.weights) + values(other.weights), "twice": twice}


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
        "stateless": error(stateless.stateless_apply, stateless.variables, grads, model.trainable_variables),
        "legacy": error(hvd.load_model, "nowhere.keras", legacy_opts=True),
        "global variables": error(hvd.broadcast_global_variables, 0),
        "global variables differ": different_models(),
        "still plain": type(optimizer) is optimizers.SGD,
    }


@case
def compile_options():
    """Pass the arguments of Horovod's examples to compile."""
    compiled(hvd.DistributedOptimizer(optimizers.SGD()), run_eagerly=False, experimental_run_tf_function=False)
    other = error(compiled, optimizers.SGD(), experimental_run_tf_function=False)
    legacy = [keras.optimizers.legacy.Adam is optimizers.Adam, tf.keras.optimizers.legacy.SGD is optimizers.SGD]
    return {"other": other, "legacy": legacy}
