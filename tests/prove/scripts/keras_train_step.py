"""A Keras model with its own train_step and test_step under the drop-in, and with metrics of its own."""

import keras
import numpy as np
import tensorflow as tf

import allstep.tensorflow.horovod_keras as hvd

hvd.init()
size, rank = hvd.size(), hvd.rank()


class Autoencoder(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential(
            [keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.1), keras.layers.Dense(4)]
        )
        self.decoder = keras.Sequential([keras.layers.Dense(16, "relu"), keras.layers.Dense(12)])
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, inputs, training=False):
        return self.decoder(self.encoder(inputs, training=training), training=training)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(data, training=True) - data))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=False))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data):
        self.loss_tracker.update_state(tf.reduce_mean(tf.square(self(data, training=False) - data)))
        return {"loss": self.loss_tracker.result()}


points = np.random.default_rng(0).normal(size=(448, 12)).astype("float32")
train = tf.data.Dataset.from_tensor_slices(points[:320]).shard(size, rank).shuffle(320, seed=1).batch(8)
test = tf.data.Dataset.from_tensor_slices(points[320:]).shard(size, rank).batch(16)
model = Autoencoder()
model.compile(hvd.DistributedOptimizer(keras.optimizers.AdamW(1e-3)))
model.fit(
    train.prefetch(2),
    validation_data=test,
    epochs=2,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()],
    verbose=2 if rank == 0 else 0,
)
if rank == 0:
    model.save_weights("autoencoder.weights.h5")
