"""A PyDataset whose batches belong to ranks, sample weights, and gradients that Keras accumulates and clips."""

import keras
import numpy as np

import allstep.tensorflow.horovod_keras as hvd

hvd.init()
size, rank = hvd.size(), hvd.rank()


class Batches(keras.utils.PyDataset):
    def __init__(self, inputs, labels, batch_size):
        super().__init__()
        self.inputs, self.labels, self.batch_size = inputs, labels, batch_size
        self.order, self.epoch = np.arange(len(inputs)), 0
        self.on_epoch_end()

    def __len__(self):
        return len(self.inputs) // (self.batch_size * size)

    def __getitem__(self, index):
        begin = (index * size + rank) * self.batch_size
        chosen = self.order[begin : begin + self.batch_size]
        return self.inputs[chosen], self.labels[chosen], np.where(self.labels[chosen] == 1, 2.0, 1.0)

    def on_epoch_end(self):
        np.random.default_rng(self.epoch).shuffle(self.order)
        self.epoch += 1


generator = np.random.default_rng(0)
inputs = generator.normal(size=(352, 10)).astype("float32")
labels = (inputs[:, 0] > 0.5).astype("int32")
model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(2)])
optimizer = keras.optimizers.Adam(1e-3, gradient_accumulation_steps=2, clipnorm=1.0, use_ema=True)
model.compile(
    hvd.DistributedOptimizer(optimizer),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    weighted_metrics=["accuracy"],
)
model.fit(
    Batches(inputs, labels, 8),
    epochs=2,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()],
    verbose=0,
)
