"""Activation checkpointing. Oracle: the same network without it."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from allstep.pytorch.models import build_model
from allstep.pytorch.recompute import recompute_blocks

MODELS = {
    "resnet18": (32, 32, 3),
    "resnet32": (16, 16, 1),
    "wide-resnet": (16, 16, 1),
    "vit-small-images": (16, 16, 1),
    "cnn": (8, 8, 1),
}


def backward(network: nn.Module, images: torch.Tensor) -> int:
    """Run forward and backward, and return the bytes saved for backward, counting each storage once."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = network(images).square().sum()
    loss.backward()
    weights = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    return sum(size for pointer, size in kept.items() if pointer not in weights)


@pytest.mark.parametrize("name", MODELS)
def test_computes_the_same_and_keeps_less(name):
    height, width, channels = MODELS[name]
    torch.manual_seed(0)
    network = build_model(name, MODELS[name], 10)
    expected = copy.deepcopy(network)
    recompute_blocks(network)
    images = torch.randn(4, channels, height, width)
    kept, all_of_it = backward(network, images), backward(expected, images)
    assert kept < all_of_it / 2
    for (key, one), other in zip(network.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), key
    for (key, one), other in zip(network.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(one, other), key  # running statistics, too


class Renormalised(nn.Module):
    """A layer that draws random numbers of three kinds, and computes with statistics of the batches before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.InstanceNorm1d(6, track_running_stats=True)
        self.register_buffer("running_sum", torch.zeros(6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.linear(inputs), 0.5) * random.random() * np.random.rand()
        hidden = self.norm(hidden[:, :, None].expand(-1, -1, 3) * torch.arange(3)).sum(2) * (1 + self.running_sum)
        self.running_sum += hidden.detach().mean(0)
        return hidden


def test_computes_with_the_random_numbers_and_statistics_of_the_forward_pass():
    network = nn.Sequential(Renormalised(), Renormalised(), nn.Sequential(Renormalised(), nn.Linear(6, 2)))
    expected = copy.deepcopy(network)
    recompute_blocks(network)
    samples, drawn = torch.randn(8, 6), []
    for one in (network, expected):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        for _ in range(2):
            one(samples).square().sum().backward()
        drawn.append((random.random(), np.random.rand(), torch.rand(1)))
    assert drawn[0] == drawn[1]
    for (name, parameter), other in zip(network.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad), name
    for (name, value), other in zip(network.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(value, other), name
