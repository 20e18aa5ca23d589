"""ResNets for small images in PyTorch. Oracle: the papers in NumPy (tests/forward.py), and published counts."""

from __future__ import annotations

import forward
import numpy as np
import pytest
import torch

from allstep.common.recipe.weights import initial_weights
from allstep.pytorch.models import build_model, export_weights, import_weights

NUM_PARAMETERS = {"resnet32": 0.46e6, "resnet44": 0.66e6, "resnet56": 0.85e6, "resnet110": 1.7e6}
"""Numbers from table 6 of He et al. 2016."""
WIDE = {(40, 1): 0.6e6, (16, 8): 11.0e6, (28, 10): 36.5e6}
"""Numbers by depth and width, from tables 3 and 4 of Zagoruyko and Komodakis 2016."""


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_as_many_parameters_as_published(name):
    model = build_model(name, (32, 32, 3), 10)
    number = sum(parameter.numel() for parameter in model.parameters())
    assert number == pytest.approx(NUM_PARAMETERS[name], rel=0.02)


@pytest.mark.parametrize(("depth", "width"), WIDE)
def test_as_many_parameters_as_published_of_a_wide_network(depth, width):
    model = build_model("wide-resnet", (32, 32, 3), 10, depth=depth, width=width)
    number = sum(parameter.numel() for parameter in model.parameters())
    assert number == pytest.approx(WIDE[depth, width], abs=0.05e6)


@pytest.mark.parametrize("name", ["resnet32", "wide-resnet"])
@pytest.mark.parametrize("image_shape", [(8, 8, 1), (9, 7, 3)])
def test_logits_are_those_of_the_oracle(name, image_shape):
    model = build_model(name, image_shape, 7)
    weights = initial_weights({of: array.shape for of, array in export_weights(model).items()}, seed=3)
    random = np.random.default_rng(0)
    # Statistics, scales and shifts that have an effect.
    for array in weights.values():
        if array.ndim == 1:
            array += random.uniform(-0.2, 0.2, array.shape)
    import_weights(model, weights)
    images = random.normal(size=(3, *image_shape)).astype(np.float32)
    model.eval()
    with torch.inference_mode():
        received = model(torch.from_numpy(images).permute(0, 3, 1, 2)).numpy()
    expected = forward.resnet_logits(name, weights, images)
    np.testing.assert_allclose(received, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
