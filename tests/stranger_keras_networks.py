"""Keras models in other people's styles, and what trains them: a Session, and `fit` of plain Keras."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from allstep.tensorflow import Session

SIZE, EPOCHS, RATE = 24, 3, 0.05
random = np.random.default_rng(0)
VECTORS = random.standard_normal((SIZE, 5)).astype(np.float32)
IMAGES = random.standard_normal((SIZE, 8, 8, 2)).astype(np.float32)
SERIES = random.standard_normal((SIZE, 7, 4)).astype(np.float32) * (np.arange(7) < 4)[:, None]
WORDS = random.integers(0, 9, (SIZE, 7))
LABELS = np.arange(SIZE) % 3


def stacked(samples, *hidden):
    kind = "int64" if samples is WORDS else "float32"
    return keras.Sequential([layers.Input(samples.shape[1:], dtype=kind), *hidden, layers.Dense(3)])


class Custom(keras.Model):
    """Model without an input layer; subclasses change what they are named after."""

    def __init__(self):
        super().__init__()
        self.hidden, self.logits = layers.Dense(4), layers.Dense(3)

    def call(self, inputs, training=False):
        return self.logits(self.hidden(inputs))


class TakesNoTraining(Custom):
    """A network that `fit` of Keras calls as in validation: its batch norm neither learns nor normalises by samples."""

    def __init__(self):
        super().__init__()
        self.norm = keras.Sequential([layers.Dropout(0.5), layers.BatchNormalization()])

    def call(self, inputs):
        return super().call(self.norm(inputs))


class AddsLossAndMetric(Custom):
    def __init__(self):
        super().__init__()
        self.mean = keras.metrics.Mean()

    def call(self, inputs, training=False):
        outputs = super().call(inputs)
        self.mean.update_state(outputs)
        self.add_loss(0.3 * keras.ops.mean(keras.ops.square(outputs)))
        return outputs


class TiedWeights(Custom):
    def call(self, inputs, training=False):
        return self.logits(self.hidden(inputs) @ tf.transpose(self.hidden.kernel))


class Counts(layers.Layer):
    def __init__(self, dtype_of_count):
        super().__init__()
        self.count = self.add_weight(shape=(), dtype=dtype_of_count, trainable=False, initializer="zeros", name="count")

    def call(self, inputs, training=False):
        if training:
            self.count.assign_add(1)
        return inputs * (1 + 0.1 * tf.cast(self.count, inputs.dtype))


class SetsFromFirstSamples(layers.Layer):
    def build(self, shape):
        self.shift = self.add_weight(shape=shape[1:], initializer="zeros", name="shift")

    def call(self, inputs, training=False):
        if training:
            self.shift.assign(tf.where(tf.reduce_all(self.shift == 0), -tf.reduce_mean(inputs, 0), self.shift))
        return inputs + self.shift


class Codebook(layers.Layer):
    """Vectors that follow the samples, as a moving average of Keras would be named otherwise."""

    def build(self, shape):
        self.vectors = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False, name="vectors")

    def call(self, inputs, training=False):
        if training:
            self.vectors.assign(0.9 * self.vectors + 0.1 * tf.reduce_mean(inputs, 0))
        return inputs - self.vectors


class Centred(layers.Layer):
    def call(self, inputs):
        return inputs - tf.reduce_mean(inputs, 0)


class Experts(layers.Layer):
    """Experts with room for a few samples of a batch; those that come later pass by."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = layers.Dense(2), [layers.Dense(5) for _ in range(2)]

    def call(self, inputs):
        chosen = keras.ops.one_hot(keras.ops.argmax(self.router(inputs), -1), 2)
        has_room = keras.ops.cumsum(chosen, 0) <= keras.ops.cast(keras.ops.shape(inputs)[0] // 3, "float32")
        kept = chosen * keras.ops.cast(has_room, "float32")
        return inputs + sum(kept[:, number, None] * one(inputs) for number, one in enumerate(self.experts))


class AddsSum(layers.Layer):
    """A loss that is a sum over samples, which Keras adds to a mean."""

    def call(self, inputs):
        self.add_loss(0.01 * keras.ops.sum(keras.ops.square(inputs)))
        return inputs


class AddsEach(layers.Layer):
    """A loss of each sample, of which Keras adds the sum to a mean."""

    def call(self, inputs):
        self.add_loss(0.01 * keras.ops.sum(keras.ops.square(inputs), 1))
        return inputs


class AddsAtLeast(layers.Layer):
    """A loss that counts from some size on, as that of variational autoencoders with free bits."""

    def call(self, inputs):
        self.add_loss(keras.ops.maximum(keras.ops.mean(keras.ops.square(inputs)), 5.0))
        return inputs


class Begins(layers.Layer):
    """A flag of Python, of which Keras sees the first value when it traces a step."""

    def __init__(self):
        super().__init__()
        self.has_begun = False

    def call(self, inputs, training=False):
        outputs = inputs if self.has_begun or not training else 2 * inputs
        self.has_begun = self.has_begun or bool(training)
        return outputs


class DrawsByTensorFlow(layers.Layer):
    def call(self, inputs, training=False):
        return inputs + tf.random.normal(tf.shape(inputs), seed=1) if training else inputs


class Returns(Custom):
    """A network whose outputs a function wraps."""

    def __init__(self, wrap):
        super().__init__()
        self.wrap = wrap

    def call(self, inputs, training=False):
        return self.wrap(super().call(inputs), training)


class RunningLoss(keras.losses.Loss):
    def __init__(self):
        super().__init__()
        self.mean = keras.Variable(1.0, trainable=False)

    def call(self, targets, outputs):
        self.mean.assign(0.9 * self.mean + 0.1)
        return self.mean * keras.losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True)


class SignsGradients(keras.optimizers.SGD):
    def apply_gradients(self, pairs):
        return super().apply_gradients([(tf.sign(gradient), variable) for gradient, variable in pairs])


@tf.custom_gradient
def with_clipped_gradient(inputs):
    return tf.identity(inputs), lambda gradient: tf.clip_by_norm(gradient, 0.01)


@tf.custom_gradient
def with_centred_gradient(inputs):
    return tf.identity(inputs), lambda gradient: gradient - tf.reduce_mean(gradient, 0)


def centred_by_operations():
    """Return a network of Keras' own layers and operations, one of which computes samples together."""
    inputs = layers.Input((5,))
    hidden = layers.BatchNormalization()(inputs)
    return keras.Model(inputs, layers.Dense(3)(hidden - keras.ops.mean(hidden, axis=0)))


class Forgetful(layers.Layer):
    """A variable of TensorFlow, which Keras does not know."""

    def __init__(self, in_list=False):
        super().__init__()
        calls = tf.Variable(0.0, trainable=False)
        self.calls = [calls] if in_list else calls

    def call(self, inputs, training=False):
        calls = self.calls[0] if isinstance(self.calls, list) else self.calls
        if training:
            calls.assign_add(1.0)
        return inputs * (1 + 0.1 * calls)


def adapted(samples):
    layer = layers.Normalization()
    layer.adapt(samples)
    return layer


def frozen():
    model = stacked(VECTORS, layers.Dense(6), layers.BatchNormalization(), layers.Dense(4))
    model.compile("adam", "mse")
    for layer in model.layers[:2]:
        layer.trainable = False
    return model


def with_named_input():
    inputs = layers.Input((5,), name="features")
    return keras.Model({"features": inputs}, [layers.Dense(3)(inputs)])


def quantised():
    model = stacked(VECTORS, layers.Dense(6))
    model.layers[0].quantize("int8")
    return model


def in_layers_of(policy):
    return keras.Sequential([layers.Input((5,)), layers.Dense(4, dtype=policy), layers.Dense(3, dtype=policy)])


def bounded():
    options = {"kernel_constraint": keras.constraints.MaxNorm(0.3), "bias_constraint": keras.constraints.NonNeg()}
    return stacked(VECTORS, layers.Dense(7, **options))


def plain(samples, build, optimizer, run_eagerly=True):
    keras.utils.set_random_seed(1)
    model = build()
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=run_eagerly)
    model.fit(samples, LABELS, SIZE, EPOCHS, verbose=0, shuffle=False)
    return model


def trained(samples, build, **flags):
    keras.backend.clear_session()  # names of layers count on, and checkpoints have them
    keras.utils.set_random_seed(1)
    model = build()
    model(samples[:2])
    data = samples, LABELS
    Session(model, data, data, **{"epochs": EPOCHS, "global_batch_size": SIZE, **flags}).fit()
    return model


SGD = {"optimizer": "sgd", "momentum": 0.0, "base_lr": RATE}


def same_weights(one, other, atol=1e-5):
    for found, expected in zip(one.weights, other.weights, strict=True):
        message = expected.path
        np.testing.assert_allclose(found.value.numpy(), expected.value.numpy(), 1e-4, atol, err_msg=message)


def built_for_two_samples():
    model = keras.Sequential([layers.Dense(4), layers.Dense(3)])
    model.build((2, *VECTORS.shape[1:]))
    return model


def float8():
    model = stacked(VECTORS, layers.Dense(6))
    model.quantize("float8")
    return model
