"""Keras' fit under MultiWorkerMirroredStrategy, in the shape of TensorFlow's tutorial."""

import keras
import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
task = strategy.cluster_resolver.task_id
num_workers = strategy.num_replicas_in_sync

generator = np.random.default_rng(0)
inputs = generator.normal(size=(512, 16)).astype("float32")
labels = inputs[:, :4].argmax(1)
dataset = tf.data.Dataset.from_tensor_slices((inputs, labels)).shuffle(512, seed=1).batch(32)

with strategy.scope():
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(4)])
    model.compile(keras.optimizers.SGD(0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True))

model.fit(dataset, epochs=2, verbose=0)
