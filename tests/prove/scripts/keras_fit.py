"""Keras' fit under Horovod, in the shape of Horovod's example for MNIST, with batch norm and dropout."""

import os

import keras
import numpy as np

import allstep.tensorflow.horovod_keras as hvd

hvd.init()
size, rank = hvd.size(), hvd.rank()

generator = np.random.default_rng(0)
inputs = generator.normal(size=(768, 16)).astype("float32")
labels = inputs[:, :4].argmax(1)
train, test = slice(rank, 512, size), slice(512 + rank, 768, size)

model = keras.Sequential(
    [keras.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(4)]
)
optimizer = keras.optimizers.SGD(0.05 * size, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer)
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
model.fit(
    inputs[train],
    labels[train],
    batch_size=16,
    epochs=3,
    callbacks=callbacks,
    validation_data=(inputs[test], labels[test]),
    verbose=0,
)
if rank == 0:
    model.save(os.environ.get("CHECKPOINT", "keras_fit.keras"))
