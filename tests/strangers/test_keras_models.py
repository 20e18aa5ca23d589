"""Keras models in other people's styles in a Session. Oracle: `fit` of plain Keras with the whole batch."""

from __future__ import annotations

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from stranger_keras_networks import (
    IMAGES,
    RATE,
    SERIES,
    SGD,
    VECTORS,
    WORDS,
    AddsEach,
    AddsLossAndMetric,
    AddsSum,
    Begins,
    Centred,
    Codebook,
    Counts,
    Custom,
    Returns,
    SetsFromFirstSamples,
    TakesNoTraining,
    TiedWeights,
    adapted,
    bounded,
    built_for_two_samples,
    frozen,
    in_layers_of,
    plain,
    quantised,
    same_weights,
    stacked,
    trained,
    with_named_input,
)

from allstep.tensorflow.session import Session
from allstep.tensorflow.user_loop import shard

TRAIN = {
    "spectral normalization": (VECTORS, lambda: stacked(VECTORS, layers.SpectralNormalization(layers.Dense(7)))),
    "batch norm over another axis": (
        IMAGES, lambda: stacked(IMAGES, layers.BatchNormalization(axis=1, momentum=0.5, center=False), layers.Flatten())
    ),
    "group norm": (IMAGES, lambda: stacked(IMAGES, layers.GroupNormalization(2), layers.GlobalAveragePooling2D())),
    "masked, two ways": (SERIES, lambda: stacked(SERIES, layers.Masking(), layers.Bidirectional(layers.GRU(4)))),
    "masked words": (WORDS, lambda: stacked(WORDS, layers.Embedding(9, 4, mask_zero=True), layers.LSTM(4))),
    "looked up": (
        WORDS, lambda: stacked(WORDS, layers.IntegerLookup(vocabulary=[1, 2, 3], output_mode="multi_hot"))
    ),
    "hashed": (WORDS, lambda: stacked(WORDS, layers.Hashing(5), layers.Embedding(5, 3), layers.Flatten())),
    "adapted": (VECTORS, lambda: stacked(VECTORS, adapted(3 * VECTORS + 1))),
    "constraints": (VECTORS, bounded),
    "frozen after compile": (VECTORS, frozen),
    "quantised": (VECTORS, quantised),
    "bfloat16 in its layers": (VECTORS, lambda: in_layers_of("mixed_bfloat16")),
    "adds loss and metric": (VECTORS, AddsLossAndMetric),
    "tied weights": (VECTORS, TiedWeights),
    "named input, list of outputs": (VECTORS, with_named_input),
    "counter": (VECTORS, lambda: stacked(VECTORS, Counts("int32"))),
    "first samples": (VECTORS, lambda: stacked(VECTORS, SetsFromFirstSamples())),
    "codebook": (VECTORS, lambda: stacked(VECTORS, Codebook())),
    "coupled": (VECTORS, lambda: stacked(VECTORS, Centred())),
    "adds a sum": (VECTORS, lambda: stacked(VECTORS, AddsSum())),
    "adds a loss of each sample": (VECTORS, lambda: stacked(VECTORS, layers.Dense(5), AddsEach())),
    "takes no training": (VECTORS, TakesNoTraining),
    "built for two samples": (VECTORS, built_for_two_samples),
    "traced flag": (VECTORS, lambda: stacked(VECTORS, Begins())),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAIN)
def test_trains_as_keras_does(name):
    samples, build = TRAIN[name]
    expected = plain(samples, build, keras.optimizers.SGD(RATE), run_eagerly=name != "traced flag")
    atol = 1e-3 if "bfloat16" in name else 1e-5
    same_weights(trained(samples, build, **SGD), expected, atol)


WRAPS = {
    "object": lambda logits, _: SimpleNamespace(logits=logits, loss=None),
    "dictionary": lambda logits, _: {"logits": logits, "features": logits},
    "in training alone": lambda logits, training: (logits, None) if training else logits,
}


@pytest.mark.parametrize("name", WRAPS)
def test_networks_train_on_their_logits(name):
    expected = plain(VECTORS, Custom, keras.optimizers.SGD(RATE))
    same_weights(trained(VECTORS, lambda: Returns(WRAPS[name]), **SGD), expected)


def test_one_number_of_each_sample_needs_no_axis_of_its_own():
    draw = np.random.default_rng(0)
    data = draw.normal(size=(12, 5)).astype(np.float32), draw.normal(size=12).astype(np.float32)
    model = keras.Sequential([layers.Input((5,)), layers.Dense(1), layers.Reshape(())])
    expected = keras.models.clone_model(model)
    expected.set_weights(model.get_weights())
    expected.compile(keras.optimizers.SGD(RATE), "mse")
    expected.fit(*data, batch_size=12, verbose=0)
    Session(model, data, data, optimizer=keras.optimizers.SGD(RATE), epochs=1, global_batch_size=12).fit()
    same_weights(model, expected)


def without_decay_of_biases():
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


OPTIMIZERS = {
    "clipnorm": lambda: keras.optimizers.SGD(RATE, clipnorm=0.1),
    "clipvalue": lambda: keras.optimizers.SGD(RATE, clipvalue=0.01),
    "global_clipnorm": lambda: keras.optimizers.Adam(RATE, global_clipnorm=0.1),
    "exclusions": without_decay_of_biases,
    "lion": lambda: keras.optimizers.Lion(0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_as_in_keras(name):
    make = OPTIMIZERS[name]
    same_weights(trained(VECTORS, Custom, optimizer=make()), plain(VECTORS, Custom, make()))


class Noise(layers.Layer):
    """Draws from the global generator of Keras, and from one of its own."""

    def __init__(self):
        super().__init__()
        self.generator = tf.random.Generator.from_seed(3)

    def call(self, inputs, training=False):
        own = self.generator.normal(tf.shape(inputs))
        return inputs + keras.random.normal(tf.shape(inputs)) + own if training else inputs


def test_random_layers_go_on_as_if_undisturbed(tmp_path):
    hidden = layers.Dropout(0.5), layers.GaussianNoise(0.1), Noise()
    undisturbed = trained(VECTORS, lambda: stacked(VECTORS, *hidden), epochs=2, output_dir=str(tmp_path / "a"))
    for flags in ({"epochs": 1}, {"epochs": 2, "resume": "latest"}):
        hidden = layers.Dropout(0.5), layers.GaussianNoise(0.1), Noise()
        resumed = trained(VECTORS, lambda: stacked(VECTORS, *hidden), output_dir=str(tmp_path / "b"), **flags)  # noqa: B023
    same_weights(resumed, undisturbed)


def test_state_that_layers_derive_comes_from_the_checkpoint(tmp_path):
    """The second model is adapted to other samples; the checkpoint's statistics replace its."""

    def first():
        return stacked(VECTORS, adapted(3 * VECTORS + 1))

    whole = trained(VECTORS, first, epochs=2, output_dir=str(tmp_path / "a"))
    trained(VECTORS, first, epochs=1, output_dir=str(tmp_path / "b"))
    resumed = trained(
        VECTORS, lambda: stacked(VECTORS, adapted(VECTORS)), epochs=2, resume="latest", output_dir=str(tmp_path / "b")
    )
    same_weights(resumed, whole)
    np.testing.assert_allclose(resumed(VECTORS), whole(VECTORS), rtol=1e-4, atol=1e-5)


def test_shards_keep_shapes_and_types_of_samples():
    class Read:
        def __len__(self):
            return 6

        def read(self, indices, epoch):
            return inputs[indices], targets[indices]

    inputs, targets = np.linspace(0, 1, 18).reshape(6, 3, 1), np.arange(6, dtype=np.int32)[:, None]
    for samples in ((inputs, targets), Read(), [*zip(inputs, targets, strict=True)]):
        ((read, labels),) = shard(samples, 6)
        assert (read.dtype, labels.dtype) == (tf.float64, tf.int32)
        np.testing.assert_array_equal(read, inputs[labels[:, 0]])
