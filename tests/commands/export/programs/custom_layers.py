"""Keras network for --model with a layer of its own, random numbers and a count."""

import keras
from keras import layers


class Scale(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")
        self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="count")

    def call(self, inputs, training=False):
        if training:
            self.count.assign_add(1)
        return inputs * self.scale


def build(shape, classes):
    return keras.Sequential([
        keras.Input(shape), layers.RandomTranslation(0.1, 0.1), Scale(), layers.Flatten(), layers.Dense(classes)
    ])  # fmt: skip
