"""Layers with losses, statistics and constants beside their weights."""

import keras
import numpy as np
from keras import layers
from stranger import (
    BATCH,
    CLASSES,
    FEATURES,
    callbacks,
    compiled,
    distributed,
    fails,
    fit,
    network,
    samples,
    shard,
    trains,
)


class Activity(layers.Layer):
    def __init__(self, reduce=keras.ops.mean):
        super().__init__()
        self.reduce = reduce

    def call(self, inputs):
        self.add_loss(0.01 * self.reduce(keras.ops.square(inputs)))
        return inputs


@trains
def regularizers_and_add_loss(hvd, rank, size):
    keras.utils.set_random_seed(rank)
    hidden = layers.Dense(5, kernel_regularizer=keras.regularizers.L2(0.1), name="hidden")
    model = keras.Sequential([keras.Input((FEATURES,)), hidden, Activity(), layers.Dense(CLASSES)])
    fit(hvd, compiled(hvd, model), rank, size)
    return model


@trains
def losses_that_layers_add_alone(hvd, rank, size):
    """A sum is told, since ranks would average it."""
    for reduce in (keras.ops.sum, keras.ops.mean):
        keras.utils.set_random_seed(rank)
        model = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(CLASSES), Activity(reduce)])
        model.compile(distributed(hvd, keras.optimizers.SGD(0.1)))
        x = shard(samples()[0], rank, size)
        model.fit(x, batch_size=BATCH // size, callbacks=callbacks(hvd), shuffle=False, verbose=0)
    return model


@trains
def batch_norm_over_all_ranks(hvd, rank, size):
    keras.utils.set_random_seed(rank)
    inputs = keras.Input((FEATURES,))
    make = hvd.SyncBatchNormalization if hvd else layers.BatchNormalization
    branches = [make(momentum=0.5)(layers.Dense(5)(inputs)) for _ in range(2)]
    hidden = layers.BatchNormalization(synchronized=bool(hvd))(layers.Add()(branches))
    model = keras.Model(inputs, layers.Dense(CLASSES)(hidden))
    fit(hvd, compiled(hvd, model, keras.optimizers.SGD(0.1), run_eagerly=False), rank, size)
    return model


@trains
def batch_norm_eagerly(hvd, rank, size):
    keras.utils.set_random_seed(rank)
    norm = layers.BatchNormalization(synchronized=bool(hvd))
    model = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(5), norm, layers.Dense(CLASSES)])
    fit(hvd, compiled(hvd, model, keras.optimizers.SGD(0.1)), rank, size)
    return model


@trains
def batch_norm_of_masked_samples(hvd, rank, size):
    keras.utils.set_random_seed(rank)
    inputs = keras.Input((FEATURES,))
    hidden = layers.Reshape((5, 1))(layers.Dense(5)(inputs))
    norm = layers.BatchNormalization(synchronized=bool(hvd))(hidden, mask=hidden[..., 0] > 0)
    model = keras.Model(inputs, layers.Dense(CLASSES)(layers.Flatten()(norm)))
    fit(hvd, compiled(hvd, model, keras.optimizers.SGD(0.1), run_eagerly=False), rank, size)
    return model


class Following(layers.Layer):
    """Layer with a count of its calls, and a vector that may follow the samples."""

    def __init__(self, share):
        super().__init__()
        self.share = share

    def build(self, shape):
        self.calls = self.add_weight(shape=(), dtype="int32", trainable=False, initializer="zeros", name="calls")
        self.vector = self.add_weight(shape=shape[1:], trainable=False, initializer="zeros", name="vector")

    def call(self, inputs, training=False):
        if training:
            self.calls.assign_add(1)
            self.vector.assign(self.vector + self.share * keras.ops.mean(inputs, 0))
        return inputs * (1 + 0.1 * keras.ops.cast(self.calls, "float32")) - self.vector


@trains
def custom_layer_that_counts(hvd, rank, size):
    return train_with(hvd, rank, size, Following(0))


@fails
def custom_layer_that_follows_samples(hvd, rank, size):
    return train_with(hvd, rank, size, Following(0.1))


@trains
def loss_that_is_a_sum(hvd, rank, size):
    """Oracle: that of the sum over ranks; an average of other numbers of samples is told before."""
    for op, count in (
        ((hvd.Average, len(shard(samples()[0], rank, size)) - rank), (hvd.Sum, None)) if hvd else [[0, None]]
    ):
        model, loss = network(rank), keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
        optimizer = keras.optimizers.SGD(0.01)
        model.compile(hvd.DistributedOptimizer(optimizer, op=op) if hvd else optimizer, loss)
        x, y = (shard(array, rank, size)[:count] for array in samples())
        model.fit(x, y, BATCH // size, 1, callbacks=callbacks(hvd), shuffle=False, verbose=0)
    return model


def first_part():
    """Return the samples of rank 0 of two."""
    return shard(samples()[0], 0, 2)


@trains
def normalization_adapted_by_each_rank(hvd, rank, size):
    """Oracle: the statistics of rank 0, with which all ranks start."""
    keras.utils.set_random_seed(rank)
    norm = layers.Normalization()
    norm.adapt(first_part() if rank == 0 else 100 * samples(seed=5)[0])
    model = keras.Sequential([keras.Input((FEATURES,)), norm, layers.Dense(CLASSES)])
    fit(hvd, compiled(hvd, model, run_eagerly=False), rank, size)
    return {"weights": model.weights, "outputs": model.predict(first_part(), verbose=0)}


class Inside(keras.Model):
    def __init__(self):
        super().__init__()
        self.norm, self.logits = layers.Normalization(), layers.Dense(CLASSES)

    def call(self, inputs):
        return self.logits(self.norm(inputs))


@trains
def normalization_in_a_model_in_a_model(hvd, rank, size):
    keras.utils.set_random_seed(rank)
    inside = Inside()
    inside.norm.adapt(first_part() if rank == 0 else 100 * samples(seed=5)[0])
    model = keras.Sequential([keras.Input((FEATURES,)), inside])
    fit(hvd, compiled(hvd, model), rank, size)
    return {"weights": model.weights, "outputs": model.predict(first_part(), verbose=0)}


def train_with(hvd, rank, size, *more):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((FEATURES,)), *more, layers.Dense(CLASSES)])
    fit(hvd, compiled(hvd, model), rank, size)
    return model


@fails
def bins_of_each_rank(hvd, rank, size):
    bins = layers.Discretization(num_bins=3)
    bins.adapt(samples(seed=rank)[0])
    return train_with(hvd, rank, size, bins)


@fails
def scale_of_each_rank(hvd, rank, size):
    return train_with(hvd, rank, size, layers.Rescaling(1.0 / float(samples(seed=rank)[0].std())))


@fails
def salt_of_each_rank(hvd, rank, size):
    keras.utils.set_random_seed(0)
    hashed = layers.Hashing(FEATURES, output_mode="multi_hot", salt=rank)
    model = keras.Sequential([keras.Input((FEATURES,), dtype="int32"), hashed, layers.Dense(CLASSES)])
    x, y = samples()
    compiled(hvd, model).fit(x.astype(np.int32), y, verbose=0, callbacks=callbacks(hvd))


@trains
def state_from_batch_to_batch(hvd, rank, size):
    """Each rank goes on from the state that its own samples left."""
    keras.utils.set_random_seed(rank)
    recurrent = layers.GRU(5, stateful=True)
    model = keras.Sequential([keras.Input(batch_shape=(BATCH // size, FEATURES, 1)), recurrent, layers.Dense(CLASSES)])
    fit(hvd, compiled(hvd, model), rank, size)
    return {"weights": model.trainable_variables}


@fails
def words_of_each_rank(hvd, rank, size):
    lookup = layers.StringLookup(vocabulary=["a", "b"] if rank else ["b", "a"], output_mode="one_hot")
    keras.utils.set_random_seed(0)
    words = keras.Input((1,), dtype="string")
    model = keras.Model(words, layers.Dense(CLASSES)(lookup(words)))
    compiled(hvd, model)
    texts, labels = np.array([["a"], ["b"]] * 8, object), np.array([0, 1] * 8)
    import tensorflow as tf

    model.fit(
        tf.data.Dataset.from_tensor_slices((tf.constant(texts), labels)).batch(8),
        verbose=0,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    )
    return model


class Standardise(layers.Layer):
    def __init__(self, x):
        super().__init__()
        self.mean = x.mean(0)

    def call(self, inputs):
        return inputs - self.mean


@fails
def own_layer_with_constants_of_each_rank(hvd, rank, size):
    return train_with(hvd, rank, size, Standardise(samples(seed=rank)[0]))


@trains
def own_layer_with_the_same_constants(hvd, rank, size):
    return train_with(hvd, rank, size, Standardise(samples()[0]), layers.Rescaling(0.5), layers.Dropout(0.0))


class Tree(keras.Model):
    """Takes features that it has drawn, as in a decision forest."""

    def __init__(self, seed):
        super().__init__()
        self.used = keras.ops.one_hot(np.random.default_rng(seed).choice(FEATURES, 2, replace=False), FEATURES)
        self.decide = layers.Dense(3)

    def call(self, inputs):
        return self.decide(inputs @ keras.ops.transpose(self.used))


@fails
def features_that_each_rank_draws(hvd, rank, size):
    return train_with(hvd, rank, size, Tree(seed=rank))
