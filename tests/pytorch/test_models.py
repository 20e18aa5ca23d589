"""Networks of PyTorch. Oracle: the same networks in NumPy (tests/forward.py), also used for those of TensorFlow."""

from __future__ import annotations

import forward
import numpy as np
import pytest
import torch

from allstep.common.base.errors import UserError
from allstep.common.config.train_config import TrainConfig
from allstep.common.data.datasets import synthetic
from allstep.common.recipe.weights import checksum, initial_weights
from allstep.pytorch.models import build_model, build_network, export_weights, import_weights

NUM_CLASSES = 7
IMAGE_SHAPES = [(8, 8, 1), (9, 7, 3), (6, 13, 2)]


def made(name: str, image_shape: tuple[int, int, int]) -> tuple[torch.nn.Module, dict[str, np.ndarray]]:
    """Build a network, and return it with the weights, including non-zero biases, that were set."""
    weights = initial_weights(forward.shapes(name, image_shape, NUM_CLASSES), seed=3)
    generator = np.random.default_rng(0)
    weights = {of: array + generator.normal(0, 0.1, array.shape).astype(np.float32) for of, array in weights.items()}
    model = build_model(name, image_shape, NUM_CLASSES)
    import_weights(model, weights)
    return model, weights


@pytest.mark.parametrize("image_shape", IMAGE_SHAPES)
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_logits_are_those_of_the_oracle(name, image_shape):
    model, weights = made(name, image_shape)
    images = np.random.default_rng(1).normal(size=(5, *image_shape)).astype(np.float32)
    with torch.inference_mode():
        received = model(torch.from_numpy(images).permute(0, 3, 1, 2)).numpy()
    np.testing.assert_allclose(received, forward.logits(name, weights, images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("image_shape", IMAGE_SHAPES)
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_weights_have_canonical_names_and_shapes_and_come_back(name, image_shape):
    model, weights = made(name, image_shape)
    exported = export_weights(model)
    assert {of: array.shape for of, array in exported.items()} == forward.shapes(name, image_shape, NUM_CLASSES)
    assert checksum(exported) == checksum(weights)


def test_images_that_are_too_small_are_refused():
    with pytest.raises(UserError, match="6 x 6 pixels.* for --model cnn, received 6 x 5"):
        build_model("cnn", (6, 5, 1), NUM_CLASSES)
    build_model("mlp", (1, 1, 1), 2)


def test_another_default_type_is_refused():
    try:
        torch.set_default_dtype(torch.float64)
        with pytest.raises(UserError, match=r"expected float32 as the default type .* mlp, received torch.float64"):
            build_network(TrainConfig(model="mlp"), synthetic.load(TrainConfig().data))
    finally:
        torch.set_default_dtype(torch.float32)
