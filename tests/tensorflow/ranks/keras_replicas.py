"""Cases in which replicas would diverge, which are refused at the start or detected at the end of an epoch."""

import keras
import numpy as np
import tensorflow as tf
from horovod.tensorflow import DistributedGradientTape
from keras import optimizers
from keras_cases import DIRECTORY, case, compiled, error, fit, samples, values

import allstep.tensorflow.horovod_keras as hvd

loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class TwoOptimizers(keras.Sequential):
    """Trains each half with a separate optimizer, as a GAN does, and ignores the default optimizer of `compile`."""

    def compile(self, first, second, **options):
        super().compile(loss=loss, run_eagerly=True, **options)
        self.optimizers = [first, {"second": second}]

    def train_step(self, data):
        first, second = self.optimizers[0], self.optimizers[1]["second"]
        with tf.GradientTape() as tape:
            value = self.compute_loss(data[0], data[1], self(data[0], training=True))
        grads = tape.gradient(value, self.trainable_variables)
        first.apply(grads[:2], self.trainable_variables[:2])
        second.apply(grads[2:], self.trainable_variables[2:])
        return {"loss": value}


class OwnStep(keras.Sequential):
    """Model with a custom training step that averages gradients itself, or does not average them."""

    averages = True

    def train_step(self, data):
        with tf.GradientTape() as tape:
            value = self.compute_loss(data[0], data[1], self(data[0], training=True))
        tape = DistributedGradientTape(tape) if self.averages else tape
        grads = tape.gradient(value, [v.value for v in self.trainable_variables])
        self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": value}


def layers():
    return [keras.Input((4,)), keras.layers.Dense(5, name="hidden"), keras.layers.Dense(3, name="logits")]


def local_step(averages: bool) -> OwnStep:
    keras.utils.set_random_seed(0)
    model = OwnStep(layers())
    model.averages = averages
    model.compile(optimizers.SGD(0.1), loss, run_eagerly=True)
    return model


def two_optimizers(first, second) -> TwoOptimizers:
    keras.utils.set_random_seed(hvd.rank())
    model = TwoOptimizers(layers())
    model.compile(first, second)
    return model


def sgd(**options):
    return hvd.DistributedOptimizer(optimizers.SGD(0.1, momentum=0.9), **options)


def broadcast():
    return hvd.callbacks.BroadcastGlobalVariablesCallback(0)


@case
def refused_at_the_start():
    recompiled = compiled(sgd())
    fit(recompiled, broadcast())
    recompiled.compile(optimizers.SGD(0.1), loss, run_eagerly=True)
    recompiled.evaluate(*samples(seed=0), verbose=0)
    before = values(recompiled.weights)
    one_rank = compiled(sgd() if hvd.rank() else optimizers.SGD(0.1))
    refused = {
        "plain": error(fit, compiled(optimizers.SGD(0.1)), broadcast()),
        "by name": error(fit, compiled("adam"), hvd.callbacks.MetricAverageCallback()),
        "schedule": error(fit, compiled("adam"), hvd.callbacks.LearningRateWarmupCallback(0.1)),
        "best model": error(
            fit, compiled("adam"), hvd.callbacks.BestModelCheckpoint(filepath=str(DIRECTORY / "none.keras"))
        ),
        "none": error(fit, compiled(None), broadcast()),
        "one of two": error(fit, two_optimizers(sgd(), optimizers.SGD(0.1)), broadcast()),
        "recompiled": error(fit, recompiled),
        "recompiled, batch by batch": error(recompiled.train_on_batch, *samples(seed=0)),
    }
    assert values(recompiled.weights) == before
    return {**refused, "on one rank": error(fit, one_rank, broadcast())}


@case
def not_refused():
    """Fit models without trainable weights, or with a training step that averages gradients itself."""
    frozen = compiled("rmsprop")
    frozen.trainable = False
    frozen.compile("rmsprop", loss, run_eagerly=True)
    fit(frozen, broadcast(), hvd.callbacks.MetricAverageCallback())
    compiled(None).evaluate(*samples(seed=0), verbose=0, callbacks=[broadcast(), hvd.callbacks.MetricAverageCallback()])
    model = local_step(averages=True)
    fit(model, broadcast(), epochs=2)
    return values(model.weights)


class Change(keras.callbacks.Callback):
    """Change a variable on rank 1 after the first epoch's training."""

    def __init__(self, find, by=1e-6):
        super().__init__()
        self.find, self.by = find, by

    def on_train_batch_end(self, batch, logs=None):
        if hvd.rank() == 1:
            variable = self.find(self.model)
            variable.assign(variable + tf.cast(self.by, variable.dtype))


def words(seed):
    return np.random.default_rng(seed).integers(0, 10, (32, 4)), samples(seed=seed)[1]


def embedding():
    keras.utils.set_random_seed(0)
    head = [keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((4,), dtype="int32"), keras.layers.Embedding(10, 4, name="words"), *head])
    model.compile(sgd(), loss, run_eagerly=True)
    return model


@case
def found_after_an_epoch():
    average = hvd.callbacks.MetricAverageCallback

    def changed(find, callback, model=None, by=1e-6):
        return error(fit, model or compiled(sgd()), Change(find, by), callback)

    def changed_words(by):
        change = Change(lambda m: m.layers[0].embeddings, by)
        return error(embedding().fit, *words(hvd.rank()), 32, 1, 0, [change, average()])

    return {
        "weights": changed(lambda m: m.layers[1].kernel, broadcast()),
        "slots": changed(lambda m: m.optimizer.variables[-1], average()),
        "learning rate": changed(lambda m: m.optimizer._learning_rate, hvd.callbacks.LearningRateWarmupCallback(0.1)),
        "iterations": changed(lambda m: m.optimizer._iterations, average(), by=1),
        "embedding": changed_words(0.1),
        "embedding, by rounding": changed_words(1e-7),
        "own step": error(fit, local_step(averages=False), broadcast()),
        "second optimizer": changed(
            lambda m: m.optimizers[1]["second"].variables[-1], broadcast(), two_optimizers(sgd(), sgd())
        ),
        "no broadcast": error(fit, compiled(sgd(), seed=hvd.rank()), average()),
    }


@case
def found_in_each_fit():
    """Detect differences in the second epoch of the first fit, and in the first epoch of two more."""

    class Later(Change):
        def on_epoch_begin(self, epoch, logs=None):
            self.by = 1e-6 if epoch == 1 else 0

    model = compiled(sgd())
    first = error(
        fit, model, broadcast(), hvd.callbacks.MetricAverageCallback(), Later(lambda m: m.layers[0].bias), epochs=3
    )
    again = [error(fit, model, hvd.callbacks.MetricAverageCallback()) for _ in range(2)]
    return [first, *again]


@case
def each_ranks_own():
    """Accumulators, running statistics, dropout, local layers with their slots, and process sets may differ."""
    x, y = samples(seed=hvd.rank())
    keras.utils.set_random_seed(hvd.rank())
    hidden, logits = keras.layers.Dense(5, name="hidden"), keras.layers.Dense(3, name="logits")
    more = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((4,)), hidden, *more, logits])
    optimizer = hvd.PartialDistributedOptimizer(
        optimizers.Adam(0.1, gradient_accumulation_steps=2), local_layers=logits
    )
    model.compile(optimizer, loss, run_eagerly=True)
    callbacks = [broadcast(), hvd.callbacks.MetricAverageCallback()]
    for _ in range(3):  # three batches each and two per step, so the last step is incomplete
        model.fit(x[:24], y[:24], 8, 1, 0, callbacks)
    own = {
        "accumulators": values(optimizer._accumulated_gradients),
        "local": values(logits.weights),
        "statistics": values([more[0].moving_mean]),
    }
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    alone = compiled(hvd.DistributedOptimizer(optimizers.SGD(0.1), process_set=sets[hvd.rank()]), seed=hvd.rank())
    fit(alone, hvd.callbacks.MetricAverageCallback(), hvd.callbacks.LearningRateWarmupCallback(0.1))
    outside = compiled(hvd.DistributedOptimizer(optimizers.SGD(0.1), process_set=sets[0]), seed=hvd.rank())
    fit(outside, hvd.callbacks.MetricAverageCallback())
    for process_set in sets:
        hvd.remove_process_set(process_set)
    return {"own": own, "shared": values(hidden.weights)}


@case
def a_models_own_optimizers():
    """Only rank 0 has trained before; on rank 1, the slots of one optimizer are not even built."""
    model = two_optimizers(sgd(), sgd())
    first, second = model.optimizers[0], model.optimizers[1]["second"]
    second.build(model.trainable_variables[2:])
    if hvd.rank() == 0:
        first.build(model.trainable_variables[:2])
        for variable in (*first.variables[2:], *second.variables[2:]):
            variable.assign(tf.ones_like(variable))
        first.learning_rate = 0.05
    fit(model, broadcast())
    return {"state": values([*model.weights, *first.variables, *second.variables]), "rate": float(first.learning_rate)}


@case
def state_sent_after_one_step():
    """Build the optimizer by one step before a state sends rank 0's values, as in Horovod's elastic example."""
    keras.utils.set_random_seed(hvd.rank())
    dropout = keras.layers.Dropout(0.5)
    model = keras.Sequential([*layers()[:2], dropout, layers()[2]])
    model.compile(sgd(), loss, run_eagerly=True)
    errors = [error(fit, model, steps_per_epoch=1)]
    hvd.elastic.KerasState(model).sync()
    state = values([*model.weights, *model.optimizer.variables])
    errors += [error(fit, model, steps_per_epoch=1)]
    if hvd.rank() == 1:
        model.weights[0].assign(model.weights[0] + 1)
    errors += [error(fit, model, steps_per_epoch=1)]
    return {"errors": errors, "state": state, "seed": values([dropout.seed_generator.state])}
