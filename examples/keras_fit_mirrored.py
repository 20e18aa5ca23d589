"""The script of keras_fit.py under MirroredStrategy: one process that uses all GPUs of its host, or two CPU devices.

    python examples/keras_fit_mirrored.py

One scope replaces the five steps there: Keras splits each batch over the devices and sums their gradients. It is
limited to one host; Horovod is not.
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

gpus, [cpu] = tf.config.list_physical_devices("GPU"), tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
devices = tf.config.list_logical_devices("GPU" if gpus else "CPU")
strategy = tf.distribute.MirroredStrategy([device.name for device in devices])

images, labels = load_digits(return_X_y=True)
images = images.astype("float32") / 16

with strategy.scope():  # every variable made in it has a copy on each device
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)])
    optimizer = keras.optimizers.SGD(0.1 * len(devices), momentum=0.9)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

model.fit(images[:1500], labels[:1500], batch_size=32 * len(devices), epochs=10, verbose=2)
loss, accuracy = model.evaluate(images[1500:], labels[1500:], verbose=0)
print(f"validation loss: {loss:.3f}, validation accuracy: {accuracy:.3f}")
