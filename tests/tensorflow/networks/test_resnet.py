"""ResNets of Keras. Oracle: torchvision's modules with the same weights, and PyTorch's trainer."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import torch
import torchvision

from allstep.common.recipe.weights import checksum
from allstep.tensorflow.models import build_model, canonical_weights, export_weights, import_weights
from allstep.tensorflow.networks.batch_norm import BatchNorm

NUM_PARAMETERS = {"resnet18": 11_689_512, "resnet50": 25_557_032}  # torchvision's documentation


def torchvisions(name: str, values: np.ndarray) -> tuple[torch.nn.Module, dict[str, np.ndarray]]:
    """Return torchvision's network, with the statistics of `values`, so that logits are around 1, and its weights."""
    torch.manual_seed(0)
    model = torchvision.models.get_model(name)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        model(torch.from_numpy(values).permute(0, 3, 1, 2))
        weights = {of: tensor.numpy().copy() for of, tensor in model.state_dict().items() if tensor.dim()}
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 0.1
    return model, weights


@pytest.mark.parametrize("name", NUM_PARAMETERS)
@pytest.mark.parametrize("size", [224, 75])  # even and odd maps are padded differently
def test_logits_and_statistics_are_torchvisions(name, size):
    values = np.random.default_rng(0).normal(size=(2 if size > 200 else 8, size, size, 3)).astype(np.float32)
    theirs, weights = torchvisions(name, values)
    ours = build_model(name, (size, size, 3), 1000)
    import_weights(ours, weights)
    assert checksum(export_weights(ours)) == checksum(weights)
    assert sum(int(np.prod(weight.shape)) for weight in ours.trainable_variables) == NUM_PARAMETERS[name]

    # With statistics of so few samples, PyTorch in float32 differs from PyTorch in float64 by 2e-4.
    for training, tolerance in ((False, 1e-4), (True, 1e-3)):
        theirs.train(training)
        values = values + 0.5  # or the running statistics would not change
        with torch.no_grad():
            expected = theirs(torch.from_numpy(values).permute(0, 3, 1, 2)).numpy()
        received = ours(values, training=training).numpy()
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(received, expected, rtol=0, atol=tolerance)
    state = theirs.state_dict()
    for of, array in export_weights(ours).items():
        np.testing.assert_allclose(array, state[of].numpy(), rtol=1e-4, atol=1e-4, err_msg=of)


def test_gradients_are_torchvisions_in_float64():
    """PyTorch computes in float64: with these samples, no ReLU input of ours has a different sign than in float64.

    That was measured with one thread and with two, which add up in different orders.
    """
    random = np.random.default_rng(9)
    values, labels = random.normal(size=(8, 64, 64, 3)).astype(np.float32), random.integers(0, 1000, 8)
    theirs, weights = torchvisions("resnet18", values)
    theirs.double()
    logits = theirs(torch.from_numpy(values).double().permute(0, 3, 1, 2))
    torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels)).backward()

    ours = build_model("resnet18", values.shape[1:], 1000)
    import_weights(ours, weights)
    trainable = [weight for weight in canonical_weights(ours) if weight.variable.trainable]
    with tf.GradientTape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=ours(values, training=True))
        loss = tf.reduce_mean(losses)
    gradients = tape.gradient(loss, [weight.variable.value for weight in trainable])
    expected = {name: parameter.grad.numpy() for name, parameter in theirs.named_parameters()}
    assert {weight.name for weight in trainable} == expected.keys()
    for weight, gradient in zip(trainable, gradients, strict=True):
        received, reference = weight.to_canonical(gradient.numpy()), expected[weight.name]
        assert np.abs(received - reference).max() < 1e-3 * np.abs(reference).max(), weight.name


@pytest.mark.parametrize("image_shape", [(8, 8, 1), (9, 7, 2), (1, 1, 3)])
def test_takes_images_of_any_size(image_shape):
    model = build_model("resnet18", image_shape, 7)
    for num_samples in (3, 1):
        with tf.GradientTape() as tape:
            logits = model(np.ones((num_samples, *image_shape), np.float32), training=True)
        gradients = tape.gradient(logits, [weight.value for weight in model.trainable_variables])
        assert logits.shape == (num_samples, 7) and np.isfinite(logits).all()
        assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_batch_norm_of_a_single_value_is_its_shift():
    """Oracle: the numbers of tests/pytorch/networks/test_resnet.py."""
    norm = BatchNorm()
    norm.build((None, 1, 1, 2))
    norm.beta.assign([3.0, -1.0])
    values = norm(np.array([5.0, 7.0], np.float32).reshape(1, 1, 1, 2), training=True)
    assert values.numpy().ravel().tolist() == [3.0, -1.0]
    assert norm.running_mean.numpy().tolist() == pytest.approx([0.5, 0.7])
    assert norm.running_variance.numpy().tolist() == pytest.approx([0.9, 0.9])
