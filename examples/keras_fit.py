"""A `model.fit` script under Horovod with Keras 3, trained on real handwritten digits.

    horovodrun -np 2 python examples/keras_fit.py

A script written for `horovod.keras` or `horovod.tensorflow.keras` needs the first import below and nothing else.
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import allstep.tensorflow.horovod_keras as hvd

keras.utils.set_random_seed(1)
hvd.init()  # 1. initialise: find out rank and world size
gpus = tf.config.list_physical_devices("GPU")  # 2. one GPU per process, chosen by local rank
tf.config.set_visible_devices(gpus[hvd.local_rank()] if hvd.local_size() <= len(gpus) else [], "GPU")

images, labels = load_digits(return_X_y=True)
images = images.astype("float32") / 16
train = slice(hvd.rank(), 1500, hvd.size())  # each rank trains on its own share

model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)])
optimizer = keras.optimizers.SGD(0.1 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer)  # 3. average gradients over ranks before they are applied
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # 4. all ranks start with rank 0's values
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1 * hvd.size(), warmup_epochs=2),
]
model.fit(
    images[train],
    labels[train],
    batch_size=32,
    epochs=10,
    callbacks=callbacks,
    verbose=2 if hvd.rank() == 0 else 0,  # 5. only rank 0 logs and writes
)
loss, accuracy = model.evaluate(images[1500:], labels[1500:], verbose=0)
if hvd.rank() == 0:
    print(f"validation loss: {loss:.3f}, validation accuracy: {accuracy:.3f}")
