"""Keras' fit under MirroredStrategy, in the shape of TensorFlow's tutorial: batch and rate grow with replicas."""

import os

import keras
import numpy as np
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
size = strategy.num_replicas_in_sync
batch_size = 16 * size

generator = np.random.default_rng(0)
inputs = generator.normal(size=(768, 16)).astype("float32")
labels = inputs[:, :4].argmax(1)
train = tf.data.Dataset.from_tensor_slices((inputs[:512], labels[:512])).shuffle(512).batch(batch_size)
test = tf.data.Dataset.from_tensor_slices((inputs[512:], labels[512:])).batch(batch_size)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((16,)), keras.layers.Dense(32), keras.layers.BatchNormalization(), keras.layers.ReLU(),
            keras.layers.Dropout(0.2), keras.layers.Dense(4),
        ]
    )  # fmt: skip
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05 * size, momentum=0.9), loss, metrics=["accuracy"])

model.fit(train, epochs=3, validation_data=test, verbose=0)
model.save(os.environ.get("CHECKPOINT", "mirrored_fit.keras"))
