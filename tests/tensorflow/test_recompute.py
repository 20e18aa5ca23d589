"""Activation checkpointing. Oracle: the same network without it."""

from __future__ import annotations

import random
from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from allstep.common.base.random_state import seeded
from allstep.tensorflow.compat import global_seed_generator
from allstep.tensorflow.models import build_model
from allstep.tensorflow.networks import resnet
from allstep.tensorflow.recompute import RecomputedBlocks, forward_of


class Counts(keras.layers.Layer):
    """A layer that counts its calls, computes with the count, and draws random numbers without a generator."""

    def build(self, input_shape):
        self.calls = self.add_weight(initializer="zeros", trainable=False)

    def call(self, inputs):
        self.calls.assign_add(1.0)
        return inputs / self.calls.value + keras.random.normal(tf.shape(inputs)) * random.random()


def users() -> keras.Model:
    inputs = values = keras.Input((8, 8, 1))
    for _ in range(3):
        values = keras.layers.Conv2D(3, 3)(values)
        for layer in (keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), Counts()):
            values = layer(values)
    return keras.Model(inputs, values)


NETWORKS = {
    "resnet14": lambda: resnet.build("resnet14", (16, 16, 1), 10),
    "wide-resnet": lambda: build_model("wide-resnet", (16, 16, 1), 10, depth=10, width=1),
    "vit-small-images": lambda: build_model("vit-small-images", (16, 16, 1), 10),
    "cnn": lambda: build_model("cnn", (8, 8, 1), 10),
    "a user's": users,
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
    state = [*model.variables, global_seed_generator().state]
    values = [one.numpy() for one in state]
    images = tf.random.normal((4, *model.input_shape[1:]))
    with seeded(0):
        expected, num_products = step(model, model, images)
    left = [one.numpy() for one in state]
    for one, value in zip(state, values, strict=True):
        one.assign(value)
    with seeded(0):
        received, more = step(model, RecomputedBlocks(model), images)
    assert more > num_products
    for one, other in zip(received, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(other).max())
    for one, other in zip(state, left, strict=True):  # running statistics have changed once
        np.testing.assert_array_equal(one.numpy(), other)


def test_weights_change_after_all_that_reads_them():
    """TensorFlow's optimizer of graphs forgets it for the last layer, whose gradient needs no outputs."""
    allow_all_optimizations()
    model = NETWORKS["cnn"]()
    forward = forward_of(model, in_blocks=True)
    weights = [variable.value for variable in model.trainable_variables]

    @tf.function(autograph=False)
    def compute(images: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(forward(images, training=True)))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            tf.raw_ops.ResourceApplyGradientDescent(var=weight.handle, alpha=0.1, delta=gradient)
        return loss

    context.enable_run_metadata()
    compute(tf.ones((4, 8, 8, 1)))
    graph = context.export_run_metadata().function_graphs[-1].post_optimization_graph
    context.disable_run_metadata()
    inputs = {node.name: [name.strip("^").partition(":")[0] for name in node.input] for node in graph.node}
    used = {name for node in graph.node for name in node.input if not name.startswith("^")}
    reads = [node for node in graph.node if node.op == "ReadVariableOp" and node.name in used]
    updates = {node.input[0]: node.name for node in graph.node if node.op == "ResourceApplyGradientDescent"}
    assert len(updates) == len(weights) and len(reads) > len(weights)
    for read in reads:
        assert read.name in before(inputs, updates[read.input[0]])


def before(inputs: dict[str, list[str]], name: str) -> set[str]:
    """Return the operations that run before one."""
    found, waiting = set(), [name]
    while waiting:
        waiting += (new := set(inputs[waiting.pop()]) - found)
        found |= new
    return found


@pytest.mark.parametrize("scope", [nullcontext(), keras.RematScope()], ids=["none", "RematScope"])
def test_layers_that_keras_recomputes_are_noticed(scope):
    allow_all_optimizations()
    with scope:
        layer = keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((4,)), layer])
    assert forward_of(model, in_blocks=False) is model
    assert tf.config.optimizer.get_experimental_options()["dependency_optimization"] == isinstance(scope, nullcontext)


def allow_all_optimizations() -> None:
    tf.config.optimizer.set_experimental_options({"dependency_optimization": True})
