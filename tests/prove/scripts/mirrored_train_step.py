"""MirroredStrategy with a model that has its own train_step and a loss scaled to the global batch."""

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(0)
strategy = tf.distribute.MirroredStrategy()
size = strategy.num_replicas_in_sync
batch_size = 8 * size


class Regression(keras.Model):
    def __init__(self):
        super().__init__()
        self.layer, self.head = keras.layers.Dense(16, "relu"), keras.layers.Dense(1)

    def call(self, inputs, training=False):
        return self.head(self.layer(inputs))

    def train_step(self, data):
        inputs, targets = data
        with tf.GradientTape() as tape:
            losses = tf.reduce_mean(tf.square(self(inputs, training=True) - targets), axis=-1)
            loss = tf.reduce_sum(losses) / batch_size
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=False))
        return {"loss": loss * size}


points = np.random.default_rng(0).normal(size=(320, 6)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((points, points.sum(1, keepdims=True))).shuffle(320).batch(batch_size)
with strategy.scope():
    model = Regression()
    model.compile(keras.optimizers.Adam(1e-3))
model.fit(data, epochs=2, verbose=0)
