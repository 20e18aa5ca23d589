"""Custom Keras model trained on custom arrays; the script runs in one process or on any number of ranks.

python examples/session_keras.py
horovodrun -np 2 python examples/session_keras.py
"""

import keras
from sklearn.datasets import load_digits

from allstep.tensorflow import Session  # before creating a model, so that TensorFlow starts with this rank's cores

images, labels = load_digits(return_X_y=True)
train, validation = (images[:1500] / 16, labels[:1500]), (images[1500:] / 16, labels[1500:])

model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)])
optimizer = keras.optimizers.AdamW(0.003)

history = Session(model, train, validation, optimizer=optimizer, epochs=5, global_batch_size=32).fit()
assert history[-1]["validation_accuracy"] > 0.8
