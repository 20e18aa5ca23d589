"""Networks of other people under allstep. Oracle: the same network as PyTorch itself runs it, in one process."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from torch import nn

from allstep.common.base.errors import UserError
from allstep.pytorch.strategies.batch_norm import synchronise_batch_norm

IMAGES = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
TIMM = ("resnet10t", "mobilenetv2_050", "regnetx_002", "efficientnet_lite0")


class Rescaled(nn.BatchNorm2d):
    """A batch norm that computes something of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return twice what batch norm does."""
        return 2 * super().forward(input)


class Renamed(nn.BatchNorm2d):
    """A batch norm with another constructor alone."""


def synchronised(network: nn.Module) -> nn.Module:
    network = copy.deepcopy(network)
    synchronise_batch_norm(network, lambda tensor, _: tensor, wanted=True)
    return network


def assert_same(network: nn.Module, images: torch.Tensor) -> None:
    ours = synchronised(network)
    for training in (True, False):
        outputs = []
        for one in (network, ours):
            torch.manual_seed(0)
            outputs.append(one.train(training)(images))
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-3, atol=2e-3)
    assert list(ours.state_dict()) == list(network.state_dict())


@pytest.mark.parametrize("name", TIMM)
def test_synchronised_batch_norm_keeps_what_timm_adds(name):
    torch.manual_seed(0)
    assert_same(timm.create_model(name, num_classes=3), IMAGES)


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(3),
        nn.BatchNorm2d(3, affine=False),
        nn.BatchNorm2d(3, track_running_stats=False),
        Renamed(3),
        nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()),
    ],
)
def test_synchronised_batch_norm(norm):
    assert_same(norm, IMAGES)


def test_a_network_that_brings_synchronised_batch_norm():
    norm = nn.SyncBatchNorm(3)
    norm.num_batches_tracked = None
    synchronise_batch_norm(norm, lambda tensor, _: tensor, wanted=False)
    plain = nn.BatchNorm2d(3)
    torch.testing.assert_close(norm(IMAGES), plain(IMAGES))
    torch.testing.assert_close(norm.running_var, plain.running_var)
    assert not isinstance(norm, nn.SyncBatchNorm)  # which DDP refuses on CPUs


def test_frozen_batch_norms_and_hooks_stay():
    network = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3).eval())
    seen = []
    network[0].register_forward_hook(lambda *_: seen.append(1))
    synchronise_batch_norm(network, lambda tensor, _: tensor, wanted=True)
    network(IMAGES)
    assert seen and not network[1].training and not network[1].running_mean.any()


def test_batch_norms_that_are_not_known_are_refused_by_name():
    with pytest.raises(UserError, match="received 0 of class Rescaled, which has a forward of its own"):
        synchronised(nn.Sequential(Rescaled(3)))
