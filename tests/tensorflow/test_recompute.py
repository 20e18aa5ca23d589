"""Activation checkpointing. Oracle: the same network without it."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from allstep.tensorflow.models import build_model
from allstep.tensorflow.networks import cifar_resnet
from allstep.tensorflow.recompute import RecomputedBlocks

NETWORKS = {
    "resnet14": lambda: cifar_resnet.build("resnet14", (16, 16, 1), 10),
    "wide-resnet": lambda: build_model("wide-resnet", (16, 16, 1), 10, depth=10, width=1),
    "vit-small-images": lambda: build_model("vit-small-images", (16, 16, 1), 10),
    "cnn": lambda: build_model("cnn", (8, 8, 1), 10),
}


def step(model: keras.Model, forward, images: tf.Tensor) -> tuple[list[np.ndarray], int]:
    """Return gradients, and the number of products in the graph of the step."""

    @tf.function(autograph=False)
    def compute(images: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(forward(images, training=True)))
        return tape.gradient(loss, [variable.value for variable in model.trainable_variables])

    operations = compute.get_concrete_function(images).graph.get_operations()
    num_products = sum(one.type in ("Conv2D", "MatMul", "Einsum", "BatchMatMulV2") for one in operations)
    return [gradient.numpy() for gradient in compute(images)], num_products


@pytest.mark.parametrize("name", NETWORKS)
def test_computes_the_same_once_more(name):
    keras.utils.set_random_seed(0)
    model = NETWORKS[name]()
    before = model.get_weights()
    images = tf.random.normal((4, *model.input_shape[1:]))
    expected, num_products = step(model, model, images)
    weights = model.get_weights()
    model.set_weights(before)
    received, more = step(model, RecomputedBlocks(model), images)
    assert more > num_products
    for one, other in zip(received, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(other).max())
    for one, other in zip(model.get_weights(), weights, strict=True):  # running statistics have changed once
        np.testing.assert_array_equal(one, other)
