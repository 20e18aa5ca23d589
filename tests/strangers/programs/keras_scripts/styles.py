"""Ways to write a model and its training loop."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from stranger import (
    BATCH,
    CLASSES,
    FEATURES,
    STEPS,
    callbacks,
    compiled,
    distributed,
    fit,
    loss,
    network,
    samples,
    shard,
    trains,
)


@trains
def sequential_on_arrays(hvd, rank, size):
    model = compiled(hvd, network(rank))
    history = fit(hvd, model, rank, size)
    return {"weights": model.weights, "loss": history.history["loss"]}


@trains
def functional_with_two_inputs_and_outputs(hvd, rank, size):
    keras.utils.set_random_seed(rank)
    left, right = keras.Input((FEATURES,), name="left"), keras.Input((FEATURES,), name="right")
    both = layers.Concatenate()([left, right])
    outputs = {"kind": layers.Dense(CLASSES, name="kind")(both), "size": layers.Dense(1, name="size")(both)}
    model = keras.Model({"left": left, "right": right}, outputs)
    optimizer = distributed(hvd, keras.optimizers.Adam(0.01))
    losses = {"kind": loss(), "size": "mse"}
    model.compile(optimizer, losses, loss_weights={"kind": 1.0, "size": 0.3}, run_eagerly=True)
    x, y = (shard(array, rank, size) for array in samples())
    inputs, targets = {"left": x, "right": x[:, ::-1]}, {"kind": y, "size": x.sum(1, keepdims=True)}
    model.fit(inputs, targets, BATCH // size, 2, 0, callbacks(hvd), shuffle=False)
    return model


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.logits = layers.Dense(5, activation="tanh"), layers.Dense(CLASSES)

    def call(self, inputs):
        return self.logits(self.hidden(inputs))


@trains
def subclassed_and_built_by_fit(hvd, rank, size):
    keras.utils.set_random_seed(rank)
    model = compiled(hvd, Subclassed())
    fit(hvd, model, rank, size)
    return model


class BuiltInPart(Subclassed):
    """Creates a weight before the first call, and leaves layers to it."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[1:], initializer="ones")
        self.built = True

    def call(self, inputs):
        return super().call(inputs * self.scale)


@trains
def built_in_part_before_fit(hvd, rank, size):
    keras.utils.set_random_seed(rank)
    model = compiled(hvd, BuiltInPart())
    fit(hvd, model, rank, size)
    return model


class Pair(keras.Model):
    """Encoder and decoder that `train_step` calls, and no call of its own."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(3)])
        self.decoder = keras.Sequential([keras.Input((3,)), layers.Dense(FEATURES)])

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            value = tf.reduce_mean((self.decoder(self.encoder(x)) - x) ** 2)
        gradients = tape.gradient(value, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": value}


@trains
def never_called_itself(hvd, rank, size):
    keras.utils.set_random_seed(rank)
    model = compiled(hvd, Pair())
    fit(hvd, model, rank, size)
    return model


@trains
def tf_data_in_shards_with_repeat(hvd, rank, size):
    x, y = (array.reshape(STEPS, BATCH, *array.shape[1:]) for array in samples())
    data = tf.data.Dataset.from_tensor_slices((x.reshape(-1, FEATURES), y.reshape(-1)))
    order = np.concatenate([shard(np.arange(STEPS * BATCH), rank, size)])
    data = tf.data.Dataset.from_tensor_slices((samples()[0][order], samples()[1][order])).batch(BATCH // size).repeat()
    model = compiled(hvd, network(rank), run_eagerly=False)
    model.fit(data, epochs=2, steps_per_epoch=STEPS, verbose=0, callbacks=callbacks(hvd))
    return model


@trains
def generator_with_steps_per_epoch(hvd, rank, size):
    x, y = (shard(array, rank, size) for array in samples())

    def batches():
        while True:
            for start in range(0, len(x), BATCH // size):
                yield x[start : start + BATCH // size], y[start : start + BATCH // size]

    model = compiled(hvd, network(rank))
    model.fit(batches(), epochs=2, steps_per_epoch=STEPS, verbose=0, callbacks=callbacks(hvd))
    return model


@trains
def data_of_unknown_length(hvd, rank, size):
    x, y = (shard(array, rank, size) for array in samples())
    data = tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda x, y: True).batch(BATCH // size)
    model = compiled(hvd, network(rank))
    model.fit(data, epochs=2, verbose=0, callbacks=callbacks(hvd))
    return model


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y, size):
        super().__init__()
        self.x, self.y, self.size = x, y, size

    def __len__(self):
        return len(self.x) // self.size

    def __getitem__(self, number):
        part = slice(number * self.size, (number + 1) * self.size)
        return self.x[part], self.y[part]


@trains
def py_dataset(hvd, rank, size):
    x, y = (shard(array, rank, size) for array in samples())
    model = compiled(hvd, network(rank))
    model.fit(Batches(x, y, BATCH // size), epochs=2, verbose=0, shuffle=False, callbacks=callbacks(hvd))
    return model


@trains
def sparse_inputs(hvd, rank, size):
    """Keras adds up the rows of equal indices in the gradient; Adam squares their sum."""
    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.Input((FEATURES,), sparse=True), layers.Dense(CLASSES)])
    compiled(hvd, model, keras.optimizers.Adam(0.05), run_eagerly=False)
    x, y = (shard(array, rank, size) for array in samples())
    data = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(np.maximum(x, 0)), y)).batch(BATCH // size)
    model.fit(data, verbose=0, callbacks=callbacks(hvd))
    return model


@trains
def gradient_tape_loop(hvd, rank, size):
    model, optimizer = network(rank), distributed(hvd, keras.optimizers.Adam(0.01))
    x, y = (shard(array, rank, size) for array in samples())
    if hvd:
        hvd.broadcast_variables(model.variables, 0)
    for start in range(0, len(x), BATCH // size):
        part = slice(start, start + BATCH // size)
        with tf.GradientTape() as tape:
            value = loss()(y[part], model(x[part], training=True))
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return model


class OwnStep(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            value = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(value, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": value}


@trains
def own_train_step(hvd, rank, size):
    model = compiled(hvd, OwnStep([keras.Input((FEATURES,)), *network(rank).layers]))
    fit(hvd, model, rank, size)
    return model


@trains
def batch_by_batch(hvd, rank, size):
    model = compiled(hvd, network(rank))
    x, y = (shard(array, rank, size) for array in samples())
    if hvd:
        hvd.broadcast_variables(model.variables, 0)
    for start in range(0, len(x), BATCH // size):
        model.train_on_batch(x[start : start + BATCH // size], y[start : start + BATCH // size])
    return model


@trains
def class_weights(hvd, rank, size):
    model = compiled(hvd, network(rank))
    fit(hvd, model, rank, size, class_weight={0: 1.0, 1: 2.0, 2: 0.5})
    return model


@trains
def frozen_backbone(hvd, rank, size):
    model = network(rank)
    model.layers[0].trainable = False
    fit(hvd, compiled(hvd, model), rank, size)
    return model


@trains
def lora(hvd, rank, size):
    model = network(rank)
    model.layers[0].enable_lora(2)
    fit(hvd, compiled(hvd, model), rank, size)
    return model
