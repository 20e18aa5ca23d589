"""Networks of timm, torchvision and in the manner of Hugging Face, trained for a step.

Oracle: torch's own loop over the whole batches in one process.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from ranks import full
from torch import nn
from torch.nn import functional

from allstep.common.data.sharding import sample_order
from allstep.pytorch import Session

SIZE, RATE, CLASSES, SIDE = 8, 0.0001, 5, 64
IMAGES = np.random.default_rng(0).integers(0, 256, (SIZE, SIDE, SIDE, 3), np.uint8)
LABELS = np.arange(SIZE) % CLASSES

TIMM = {
    "resnet10t": {},
    "mobilenetv2_050": {"drop_rate": 0.0},
    "mobilenetv3_small_050": {"drop_rate": 0.0},
    "efficientnet_lite0": {"drop_rate": 0.0, "drop_path_rate": 0.0},
    "regnetx_002": {},
    "convnext_atto": {},
    "resnext26ts": {},
    "ghostnet_050": {"drop_rate": 0.0},
    "vit_tiny_patch16_224": {"img_size": SIDE},
    "deit_tiny_patch16_224": {"img_size": SIDE},
    "mixer_s32_224": {"img_size": SIDE},
    "levit_conv_128s": {"img_size": SIDE, "drop_path_rate": 0.0},
}
TORCHVISION = {
    "resnet18": {},
    "mobilenet_v3_large": {"dropout": 0.0},
    "squeezenet1_1": {"dropout": 0.0},
    "mobilenet_v2": {"dropout": 0.0},
    "mobilenet_v3_small": {"dropout": 0.0},
    "shufflenet_v2_x0_5": {},
    "mnasnet0_5": {"dropout": 0.0},
    "regnet_y_400mf": {},
    "efficientnet_b0": {"dropout": 0.0, "stochastic_depth_prob": 0.0},
    "densenet121": {},
}


@dataclasses.dataclass
class Output:
    """Outputs as libraries of language models have them."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Backbone(nn.Module):
    """A backbone whose outputs have names, with a head of its own where a class of images is wanted."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.embed, self.norm = nn.Conv2d(3, 12, 8, stride=8), nn.LayerNorm(12)
        self.position = nn.Parameter(torch.randn(1, 64, 12) * 0.02)
        layer = nn.TransformerEncoderLayer(12, 2, 24, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.classifier, self.wrap = nn.Linear(12, CLASSES), wrap

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None, **options: Any) -> Any:
        hidden = self.embed(pixel_values).flatten(2).transpose(1, 2) + self.position
        return self.wrap(self, self.classifier(self.norm(self.encoder(hidden)).mean(1)))


MANNERS = {
    "dataclass": lambda _, logits: Output(logits),
    "object": lambda _, logits: SimpleNamespace(logits=logits, hidden_states=None),
    "mapping": lambda _, logits: {"logits": logits, "features": logits},
    "pair": lambda _, logits: (logits, logits.new_zeros(())),
    "list": lambda _, logits: [logits],
    "in training alone": lambda network, logits: (logits, None) if network.training else logits,
}


def build(name: str) -> nn.Module:
    """Return a network with its weights."""
    torch.manual_seed(1)
    library, _, name = name.partition(":")
    if library == "timm":
        import timm  # which takes a second, so not while tests are collected

        return timm.create_model(name, num_classes=CLASSES, **TIMM[name])
    if library == "torchvision":
        return torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **TORCHVISION[name])
    return Backbone(MANNERS[name])


def logits_of(outputs: Any) -> torch.Tensor:
    if isinstance(outputs, (tuple, list)):
        return outputs[0]
    return outputs["logits"] if isinstance(outputs, dict) else getattr(outputs, "logits", outputs)


QUICK = ("timm:resnet10t", "timm:vit_tiny_patch16_224", "timm:mobilenetv2_050", "torchvision:mobilenet_v3_small",
         "torchvision:squeezenet1_1")  # fmt: skip
ALL = [f"{library}:{name}" for library, names in (("timm", TIMM), ("torchvision", TORCHVISION)) for name in names]
CASES = [*(name if name in QUICK else full(name) for name in ALL), *(f"manner:{name}" for name in MANNERS)]


@pytest.mark.parametrize("name", CASES)
def test_one_step(name):
    """Compare all weights together, and all statistics: float32 alone changes gradients of small networks by 1.4 %."""
    network = build(name)
    theirs, before = copy.deepcopy(network), copy.deepcopy(network)
    flags = {"global_batch_size": SIZE, "base_lr": RATE, "epochs": 1, "momentum": 0.0, "weight_decay": 0.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Session(network, (IMAGES, LABELS), (IMAGES[:2], LABELS[:2]), optimizer="sgd", **flags).fit()
    chosen = sample_order(np.arange(SIZE), SIZE, seed=0, epoch=0)
    outputs = theirs(normalised(IMAGES, chosen))
    functional.cross_entropy(logits_of(outputs), torch.from_numpy(LABELS[chosen])).backward()
    torch.optim.SGD(theirs.parameters(), RATE).step()
    for numbers in (nn.Module.parameters, nn.Module.buffers):
        found, wanted, first = (flat(numbers(one)) for one in (network, theirs, before))
        assert (found - wanted).norm() <= 0.05 * (wanted - first).norm()


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.empty(0), *(one.double().flatten() for one in tensors if one.is_floating_point())])


def normalised(images: np.ndarray, chosen: np.ndarray) -> torch.Tensor:
    """Return images with mean 0 and deviation 1 in each channel, as the page on data has it."""
    channels = images.reshape(-1, 3).astype(np.float64) / 255
    values = (images[chosen] / 255 - channels.mean(0)) / channels.std(0)
    return torch.from_numpy(values.astype(np.float32)).permute(0, 3, 1, 2)
