"""Networks from a user's file and from libraries. Oracle: the file and the libraries, called directly."""

from __future__ import annotations

import numpy as np
import pytest
import timm
import torch
from torch import nn

from allstep.common.base.errors import UserError
from allstep.common.catalog.networks import is_in_both
from allstep.common.data.datasets import Dataset
from allstep.pytorch.models import export_weights
from allstep.pytorch.other_networks import build_other

IMAGES = Dataset(None, None, (12, 10, 1), 7)  # pyright: ignore[reportArgumentType] (nothing is read)
FILE = """
import torch
from torch import nn

class Network(nn.Module):
    def __init__(self, num_inputs, num_classes):
        super().__init__()
        self.norm, self.fc = nn.BatchNorm2d(1), nn.Linear(num_inputs, num_classes)
        self.register_buffer("order", torch.arange(num_inputs).flip(0))
    def forward(self, images):
        return self.fc(self.norm(images).flatten(1)[:, self.order])

def build(input_shape, num_classes):
    height, width, channels = input_shape
    return Network(height * width * channels, num_classes)
def build_tensorflow(input_shape, num_classes): return None
def too_many(input_shape, num_classes): return build(input_shape, num_classes + 1)
def raises(input_shape, num_classes): return nn.Linear("many", num_classes)
def nothing(input_shape, num_classes): pass
def no_weights(input_shape, num_classes): return nn.Sequential(nn.Flatten(), nn.AvgPool1d(17))
def half(input_shape, num_classes):
    network = build(input_shape, num_classes)
    network.extra = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    return network
def no_momentum(input_shape, num_classes):
    network = build(input_shape, num_classes)
    network.norm.momentum = None
    return network
def several(input_shape, num_classes):
    network = build(input_shape, num_classes)
    network.register_forward_hook(lambda *call: (call[-1], call[-1]))
    return network
value = 3
"""
MISTAKES = {
    "too_many": r"expected outputs \(n, 7\) of --model .*, received \(n, 8\)",
    "raises": r"expected raises\(\) to return for --model, received TypeError.* line 18 of .*mine.py",
    "nothing": "expected a torch.nn.Module from --model .*, received NoneType",
    "no_weights": "expected a network with weights to train",
    "half": "expected weights in float32 of --model .* as extra",
    "no_momentum": "expected batch norms with a momentum in --model .*, received norm without",
    "several": r"expected outputs \(n, 7\) of --model .*, received something else",
    "missing": "expected a function missing in .*mine.py for --model, received none",
    "value": "expected a function value",
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def test_a_network_of_the_users_own(file):
    torch.manual_seed(3)
    by_hand = nn.Linear(120, 7).weight
    network = build_other(f"{file}:build", IMAGES, 3)
    weights = export_weights(network)
    assert set(weights) == {
        *("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "fc.weight", "fc.bias"),
    }
    assert np.array_equal(weights["fc.weight"], by_hand.detach())
    assert network.training and all((weights["norm.running_mean"] == 0, weights["norm.running_var"] == 1))
    assert not is_in_both(f"{file}:build")


@pytest.mark.parametrize("name", MISTAKES)
def test_networks_that_do_not_fit(name, file):
    with pytest.raises(UserError, match=MISTAKES[name]):
        build_other(f"{file}:{name}", IMAGES, 0)


@pytest.mark.parametrize("model", ["timm:resnet10t", "torchvision:mobilenet_v3_small"])
def test_networks_of_libraries_take_images_of_any_channels(model):
    network = build_other(model, Dataset(None, None, (32, 32, 1), 7), 0)  # pyright: ignore[reportArgumentType]
    assert network(torch.zeros(2, 1, 32, 32)).shape == (2, 7)


def test_weights_of_a_library_have_its_names():
    dataset = Dataset(None, None, (32, 32, 3), 7)  # pyright: ignore[reportArgumentType]
    theirs = timm.create_model("resnet10t", num_classes=7).state_dict()
    shapes = {name: array.shape for name, array in theirs.items() if not name.endswith("num_batches_tracked")}
    weights = export_weights(build_other("timm:resnet10t", dataset, 0))
    assert {name: array.shape for name, array in weights.items()} == shapes


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        ("timm:resnet10", (32, 32, 3), "that timm has, received timm:resnet10; did you mean .*resnet10t"),
        ("torchvision:fasterrcnn_resnet50_fpn", (32, 32, 3), "that torchvision has, received"),
        ("torchvision:densenet121", (8, 8, 3), r"shape \(8, 8, 3\) from --model torchvision:densenet121, received Run"),
        ("timm:resnet10t", (5,), "it is for images"),
    ],
)
def test_networks_that_libraries_do_not_have(model, shape, expected):
    with pytest.raises(UserError, match=expected):
        build_other(model, Dataset(None, None, shape, 7), 0)  # pyright: ignore[reportArgumentType]
