"""Keras callbacks with state: early stopping, the best weights, and rates that fall with the batches."""

import keras
import numpy as np

import allstep.tensorflow.horovod_keras as hvd

hvd.init()
size, rank = hvd.size(), hvd.rank()


class Counter(keras.callbacks.Callback):
    """Counts batches, and lowers the rate by them."""

    def __init__(self, decay):
        super().__init__()
        self.decay, self.count = decay, 0

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1
        self.model.optimizer.learning_rate.assign(1e-3 / (1 + self.decay * self.count))


generator = np.random.default_rng(0)
inputs = generator.normal(size=(448, 10)).astype("float32")
labels = (inputs[:, 0] + 0.5 * generator.normal(size=448) > 0).astype("float32")
train, test = slice(rank, 320, size), slice(320 + rank, 448, size)
model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3))
model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True), metrics=["accuracy"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True),
    Counter(1e-2),
]
if rank == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("best.keras", save_best_only=True))
model.fit(
    inputs[train],
    labels[train],
    batch_size=8,
    epochs=4,
    validation_data=(inputs[test], labels[test]),
    callbacks=callbacks,
    verbose=0,
)
