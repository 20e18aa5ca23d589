"""Ranks that do not run `fit` alike."""

import keras
import numpy as np
import tensorflow as tf
from stranger import BATCH, CLASSES, FEATURES, callbacks, compiled, fails, fit, network, samples


def on_arrays(hvd, rank, steps, **options):
    x, y = samples(steps)
    options = {"batch_size": BATCH, "epochs": 2, "verbose": 0, "callbacks": callbacks(hvd), **options}
    return compiled(hvd, network(rank)).fit(x, y, **options)


@fails
def ten_and_eleven_batches(hvd, rank, size):
    return on_arrays(hvd, rank, 10 + rank)


@fails
def no_callbacks_at_all(hvd, rank, size):
    return on_arrays(hvd, 0, 10 + rank, callbacks=None)


@fails
def shards_of_unequal_length(hvd, rank, size):
    x, y = (array[:49] for array in samples())
    data = tf.data.Dataset.from_tensor_slices((x, y)).shard(size, rank).batch(8)
    return compiled(hvd, network(rank)).fit(data, verbose=0, callbacks=callbacks(hvd))


def unknown_length(x, y, batches):
    def read():
        for number in range(batches):
            yield x[number * 4 : number * 4 + 4], y[number * 4 : number * 4 + 4]

    return tf.data.Dataset.from_generator(
        read, output_signature=(tf.TensorSpec((None, *x.shape[1:]), x.dtype), tf.TensorSpec((None,), y.dtype))
    )


@fails
def lengths_that_no_rank_knows(hvd, rank, size):
    model = compiled(hvd, network(rank), run_eagerly=False)
    return model.fit(unknown_length(*samples(), 6 - rank), verbose=0, callbacks=callbacks(hvd))


@fails
def unknown_lengths_of_an_embedding(hvd, rank, size):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Embedding(10, 4), keras.layers.Flatten(), keras.layers.Dense(CLASSES)]
    model = compiled(hvd, keras.Sequential([keras.Input((FEATURES,), dtype="int32"), *layers]))
    words = np.random.default_rng(0).integers(0, 10, (40, FEATURES)).astype(np.int32)
    return model.fit(unknown_length(words, samples()[1], 5 + rank), verbose=0, callbacks=callbacks(hvd))


@fails
def data_that_runs_out_before_steps_per_epoch(hvd, rank, size):
    x, y = samples()
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4).take(5 - rank)
    model = compiled(hvd, network(rank))
    return model.fit(data, verbose=0, steps_per_epoch=5, callbacks=callbacks(hvd))


@fails
def other_steps_per_epoch(hvd, rank, size):
    return on_arrays(hvd, rank, 6, steps_per_epoch=3 + rank)


@fails
def other_epochs(hvd, rank, size):
    return on_arrays(hvd, rank, 2, epochs=2 + rank)


@fails
def other_initial_epoch(hvd, rank, size):
    return on_arrays(hvd, rank, 2, initial_epoch=rank)


@fails
def other_steps_per_execution(hvd, rank, size):
    x, y = samples()
    model = compiled(hvd, network(rank), run_eagerly=False, steps_per_execution=1 + rank)
    return model.fit(x, y, BATCH, 1, 0, callbacks(hvd))


@fails
def class_weights_of_each_rank(hvd, rank, size):
    return on_arrays(hvd, rank, 2, class_weight=dict.fromkeys(range(CLASSES), 1.0 + rank))


@fails
def validation_on_one_rank(hvd, rank, size):
    return on_arrays(hvd, rank, 2, validation_data=samples(1) if rank == 0 else None)


@fails
def goes_on_after_all_that(hvd, rank, size):
    fit(hvd, compiled(hvd, network(rank)), rank, size)
    return {"weights": [0.0]}


@fails
def frozen_on_one_rank(hvd, rank, size):
    model = network(rank)
    model.layers[0].trainable = rank == 0
    return fit(hvd, compiled(hvd, model), rank, size)


@fails
def classes_of_each_rank(hvd, rank, size):
    """The number of classes is counted in each rank's samples."""
    head = keras.layers.Dense(CLASSES - rank)
    model = keras.Sequential([keras.Input((FEATURES,)), *network(rank).layers[:1], head])
    return fit(hvd, compiled(hvd, model), rank, size)
