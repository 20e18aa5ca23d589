"""A custom loop under the drop-in: tf.data from a generator, two optimizers, mixed precision, averages by hand."""

import keras
import numpy as np
import tensorflow as tf

import allstep.tensorflow.horovod_keras as hvd

hvd.init()
size, rank = hvd.size(), hvd.rank()
points = np.random.default_rng(0).normal(size=(320, 8)).astype("float32")


def stream():
    for index in range(rank, len(points), size):
        yield points[index]


data = tf.data.Dataset.from_generator(stream, output_signature=tf.TensorSpec((8,), tf.float32))
data = data.shuffle(64, seed=3).batch(8, drop_remainder=True).prefetch(1)
maker = keras.Sequential([keras.Input((4,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(8)])
judge = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
maker_optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3), name="maker")
judge_optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3), name="judge")
cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)
noise = tf.random.Generator.from_seed(1000 * (1 + rank))
hvd.broadcast_variables(maker.weights + judge.weights, root_rank=0)


@tf.function
def step(real):
    seeds = noise.normal((tf.shape(real)[0], 4))
    with tf.GradientTape() as maker_tape, tf.GradientTape() as judge_tape:
        fake = maker(seeds, training=True)
        of_real, of_fake = judge(real, training=True), judge(fake, training=True)
        maker_loss = cross_entropy(tf.ones_like(of_fake), of_fake)
        judge_loss = cross_entropy(tf.ones_like(of_real), of_real) + cross_entropy(tf.zeros_like(of_fake), of_fake)
    judge_optimizer.apply(judge_tape.gradient(judge_loss, judge.trainable_variables), judge.trainable_variables)
    maker_optimizer.apply(maker_tape.gradient(maker_loss, maker.trainable_variables), maker.trainable_variables)
    return maker_loss


for epoch in range(2):
    total = 0.0
    for real in data:
        total += float(step(real))
    total = float(hvd.allreduce(tf.constant(total), name="total"))
    if rank == 0:
        print(f"epoch {epoch}: {total:.3f}")
