"""Networks from a user's file and from libraries. Oracle: the file and the libraries, called directly."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import nullcontext
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from allstep.common.base.errors import UserError
from allstep.common.catalog.networks import is_in_both, parsed
from allstep.common.config.train_config import ScheduleConfig, TrainConfig
from allstep.common.data.datasets import Dataset
from allstep.common.launch.placement import ALONE
from allstep.pytorch.models import export_weights
from allstep.pytorch.other_networks import build_other
from allstep.pytorch.trial import NormCheck

IMAGES = Dataset(None, None, (12, 10, 1), 7)  # pyright: ignore[reportArgumentType] (nothing is read)
FILE = """
import functools
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
def too_few(input_shape, num_classes): return build(input_shape, num_classes - 1)
def raises(input_shape, num_classes): return nn.Linear("many", num_classes)
def nothing(input_shape, num_classes): pass
def no_weights(input_shape, num_classes): return nn.Sequential(nn.Flatten(), nn.AvgPool1d(17))
def half(input_shape, num_classes):
    network = build(input_shape, num_classes)
    network.extra = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    return network
def several(input_shape, num_classes):
    network = build(input_shape, num_classes)
    network.register_forward_hook(lambda *call: (call[-1], call[-1]))
    return network
value = 3
part = functools.partial(build)
def wide(input_shape, num_classes, *, width, name="fc"):
    return nn.Sequential(nn.Flatten(), nn.Linear(120, width), nn.Linear(width, num_classes))
"""
MISTAKES = {
    "too_few": r"expected outputs \(n, 7\) of --model .*, received \(n, 6\)",
    "raises": r"expected raises\(\) to return for --model, received TypeError.* line 19 of .*mine.py",
    "nothing": "expected a torch.nn.Module from --model .*, received NoneType",
    "no_weights": "expected a network with weights to train",
    "half": "expected weights in float32 of --model .* as extra",
    "several": r"expected outputs \(n, 7\) of --model .*, received tuple; return one tensor",
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


def test_networks_that_are_objects(file):
    with file.open("a") as stream:
        stream.write("network = nn.Sequential(nn.Flatten(), nn.Linear(120, 7))")
    assert build_other(f"{file}:part", IMAGES, 0)(torch.zeros(2, 1, 12, 10)).shape == (2, 7)
    network = build_other(f"{file}:network", IMAGES, 0)
    assert isinstance(network, nn.Sequential) and network[1].weight.shape == (7, 120)


def test_arguments_of_a_function(file):
    network = build_other(f"{file}:wide", IMAGES, 0, None, parsed(("width=5", "name=a b")))
    assert network[1].weight.shape == (5, 120)
    with pytest.raises(UserError, match="missing 1 required keyword-only argument: 'width'"):
        build_other(f"{file}:wide", IMAGES, 0)
    with pytest.raises(UserError, match="--model-args needs a function that builds the network"):
        build_other("program", IMAGES, 0, nn.Linear(120, 7), {"width": 5})
    words = ("a=1", "b=0.5", "c=(2, 3)", "d=True", "e=None", "f=gelu", "g=", "h=a=b")
    values = {"a": 1, "b": 0.5, "c": (2, 3), "d": True, "e": None, "f": "gelu", "g": "", "h": "a=b"}
    assert parsed(words) == values


@pytest.mark.parametrize("model", ["timm:vit_tiny_patch16_224", "torchvision:vit_b_32"])
def test_networks_of_libraries_that_need_the_size_of_images(model, capfd):
    network = build_other(model, Dataset(None, None, (32, 32, 3), 7), 0)  # pyright: ignore[reportArgumentType]
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
    assert f"{model} is built for images of 32 x 32 pixels" in capfd.readouterr().err


def test_arguments_of_a_librarys_network():
    dataset = Dataset(None, None, (32, 32, 3), 7)  # pyright: ignore[reportArgumentType]
    import timm  # which takes a second, so not while tests are collected

    network = build_other("timm:resnet10t", dataset, 0, None, {"drop_rate": 0.25})
    assert network.drop_rate == timm.create_model("resnet10t", drop_rate=0.25).drop_rate == 0.25
    with pytest.raises(UserError, match="unexpected keyword argument 'no_such'"):
        build_other("timm:resnet10t", dataset, 0, None, {"no_such": 1})


@pytest.mark.parametrize(("layers", "needs_two"), [
    ([nn.Flatten(), nn.BatchNorm1d(120), nn.Linear(120, 7)], True),
    ([nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(1, 7)], True),
    ([nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(120, 7)], False),
    ([nn.Flatten(), nn.Linear(120, 7)], False),
])  # fmt: skip
@pytest.mark.parametrize(("num_samples", "flags", "smallest"), [
    (65, {"batch_size": 32}, 1), (64, {"batch_size": 32}, 32), (66, {"batch_size": 32}, 2),
    (65, {"batch_size": 32, "drop_last": True}, 32), (64, {"batch_size": 1}, 1),
])  # fmt: skip
def test_a_last_batch_of_one_sample_is_known_at_the_start(layers, needs_two, num_samples, flags, smallest):
    """Oracle: PyTorch's own error in a step on the smallest batch."""
    network = build_other("program", IMAGES, 0, nn.Sequential(*copy.deepcopy(layers)))
    dataset = dataclasses.replace(IMAGES, train=range(num_samples))
    session = SimpleNamespace(config=TrainConfig(schedule=ScheduleConfig(**flags)), dataset=dataset, placement=ALONE)
    fails = smallest == 1 and needs_two
    with pytest.raises(UserError, match="of --model cnn needs two samples") if fails else nullcontext():
        NormCheck(network).check(session)
    with pytest.raises(ValueError, match="more than 1 value per channel") if fails else nullcontext():
        network(torch.zeros(smallest, 1, 12, 10))


def test_weights_of_a_library_have_its_names():
    dataset = Dataset(None, None, (32, 32, 3), 7)  # pyright: ignore[reportArgumentType]
    import timm

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


LARGE = Dataset(None, None, (160, 320, 3), 7)  # pyright: ignore[reportArgumentType]
SMALL, WHOLE = (64, 128), (160, 320)


class Sized(nn.Module):
    """Notes the sizes of images in training; takes those of any size, whole ones alone, or makes rows of pixels."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.norm, self.fc = kind, nn.BatchNorm2d(3), nn.Linear(3 * 160 * 320 if kind == "whole" else 3, 7)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            SIZES.put(tuple(images.shape[2:]))
        pixels = self.norm(images)
        outputs = self.fc(pixels.flatten(1) if self.kind == "whole" else pixels.mean((2, 3)))
        return outputs[:1] if self.kind == "rows" and images.shape[2] < 160 else outputs


SIZES = SimpleQueue()  # the trial puts a list back as it was


@pytest.mark.parametrize(("kind", "sizes"), [("any", [SMALL]), ("whole", [SMALL, WHOLE]), ("rows", [SMALL, WHOLE])])
def test_large_images_are_tried_small_where_a_network_takes_them(kind, sizes):
    network = build_other("program", LARGE, 0, Sized(kind))
    assert list(dict.fromkeys(SIZES.get() for _ in range(SIZES.qsize()))) == sizes
    assert network.training and network.norm.num_batches_tracked == 0  # pyright: ignore
