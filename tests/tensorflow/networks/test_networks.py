"""Networks of Keras. Oracle: the same networks in PyTorch, ours or a library's, with the same weights."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from ranks import full, last, train

from allstep.common.catalog.networks import MODELS
from allstep.common.recipe.weights import checksum, initial_weights
from allstep.pytorch import models as pytorch_models
from allstep.tensorflow.models import build_model, canonical_weights, export_weights, import_weights

PUBLISHED = {"vgg16": 138_357_544, "vit-tiny": 5_717_416}
"""Numbers of parameters in the documentation of torchvision and timm, for 224 x 224 x 3 images and 1000 classes."""
CASES = [
    *((name, (8, 8, 1)) for name in ("resnet32", "resnet110", "wide-resnet", "vit-small-images")),
    *((name, (9, 7, 3)) for name in ("resnet32", "wide-resnet")),
    *(
        full("vgg16", (32, 64, 3)),
        full("vgg16", (224, 224, 1)),
        ("vit-tiny", (32, 48, 3)),
        ("vit-small-images", (28, 28, 3)),
    ),
]


def pair(name: str, image_shape: tuple[int, int, int]) -> tuple[torch.nn.Module, keras.Model]:
    """Build the network in both frameworks with the same weights, none of which is zero."""
    theirs, ours = pytorch_models.build_model(name, image_shape, 7), build_model(name, image_shape, 7)
    shapes = {of: array.shape for of, array in pytorch_models.export_weights(theirs).items()}
    assert {weight.name: weight.canonical_shape for weight in canonical_weights(ours)} == shapes
    weights, random = initial_weights(shapes, seed=3), np.random.default_rng(0)
    for array in weights.values():
        if array.ndim == 1:
            array += random.uniform(-0.2, 0.2, array.shape)
    pytorch_models.import_weights(theirs, weights)
    import_weights(ours, weights)
    assert checksum(export_weights(ours)) == checksum(weights)
    return theirs, ours


@pytest.mark.parametrize(("name", "image_shape"), CASES)
def test_logits_and_gradients_are_pytorchs(name, image_shape):
    theirs, ours = pair(name, image_shape)
    images = np.random.default_rng(1).normal(size=(3, *image_shape)).astype(np.float32)
    theirs.eval()
    expected = theirs(torch.from_numpy(images).permute(0, 3, 1, 2))
    scale = float(expected.detach().abs().max())
    (expected.logsumexp(1).sum() / scale).backward()
    trainable = [weight for weight in canonical_weights(ours) if weight.variable.trainable]
    with tf.GradientTape() as tape:
        logits = ours(images, training=False)
        loss = tf.reduce_sum(tf.reduce_logsumexp(logits, 1)) / scale
    gradients = tape.gradient(loss, [weight.variable.value for weight in trainable])
    np.testing.assert_allclose(logits, expected.detach().numpy(), rtol=0, atol=1e-4 * scale)
    reference = {of: parameter.grad.numpy() for of, parameter in theirs.named_parameters()}
    assert {weight.name for weight in trainable} == reference.keys()
    for weight, gradient in zip(trainable, gradients, strict=True):
        received, wanted = weight.to_canonical(gradient.numpy()), reference[weight.name]
        assert np.abs(received - wanted).max() <= 2e-3 * np.abs(wanted).max() + 1e-6, weight.name


@pytest.mark.full
def test_vgg16_is_traced_where_a_pixel_is_left():
    model = build_model("vgg16", (32, 64, 3), 7)
    traced = tf.function(model).get_concrete_function(tf.TensorSpec((None, 32, 64, 3)))
    assert traced.structured_outputs.shape[1] == 7


@pytest.mark.parametrize("name", PUBLISHED)
def test_as_many_parameters_as_published(name):
    entry = MODELS[name]
    model = build_model(name, entry.benchmark_image, entry.benchmark_classes)
    assert sum(int(np.prod(weight.shape)) for weight in model.trainable_variables) == PUBLISHED[name]


@pytest.mark.parametrize("name", ["wide-resnet", full("vit-small-images")])
def test_trains_as_in_pytorch(name, tmp_path):
    """Train on two ranks. In a network this deep, rounding errors grow from step to step."""
    flags = ("--model", name, "--global-batch-size", 718, "--epochs", 1, "--log-every", 1, "--base-lr", 0.001)
    size = ("--model-depth", 10, "--model-width", 1) if name == "wide-resnet" else ()
    curves = {}
    for framework in ("pytorch", "tensorflow"):
        events = train(framework, "horovodrun-mpi", 2, tmp_path / framework, *flags, *size, "--momentum", 0)
        curves[framework] = [event["loss"] for event in events if event["event"] == "step"]
        curves[framework].append(last(events, "epoch")["validation_loss"])
    assert len(curves["pytorch"]) == 3 + 1
    first, second, *_ = curves["pytorch"]
    assert abs(second - first) > 0.001 * first  # or a wrong gradient would also pass
    np.testing.assert_allclose(curves["tensorflow"], curves["pytorch"], rtol=1e-3)
