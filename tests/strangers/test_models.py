"""Networks of other people under allstep. Oracle: the same network as PyTorch itself runs it, in one process."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from ranks import full
from torch import nn

from allstep.common.base.errors import UserError
from allstep.common.data.datasets import Dataset
from allstep.common.launch.placement import ALONE
from allstep.common.training.trial_check import TrialCheck
from allstep.pytorch.kept.pass_state import RUNNING, pass_state
from allstep.pytorch.losses import build_loss, with_heads
from allstep.pytorch.other_networks import build_other
from allstep.pytorch.session import Session
from allstep.pytorch.strategies.batch_norm import synchronise_batch_norm
from allstep.pytorch.strategies.fsdp import FSDP, stands_alone

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
    import timm  # which takes a second, so not while tests are collected

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


class Returns(nn.Module):
    """A linear network whose outputs a function wraps."""

    def __init__(self, wrap) -> None:
        super().__init__()
        self.fc, self.dropout, self.wrap = nn.Linear(12, 3), nn.Dropout(), wrap
        self.norm = nn.BatchNorm1d(12)

    def forward(self, images: torch.Tensor) -> object:
        """Return what `wrap` makes of the logits."""
        return self.wrap(self, self.fc(self.dropout(self.norm(images.flatten(1)))))


SMALL = Dataset(None, None, (2, 2, 3), 3)  # pyright: ignore[reportArgumentType]
WRAPS = {
    "object": lambda _, logits: SimpleNamespace(logits=logits, loss=None),
    "dictionary": lambda _, logits: {"logits": logits, "features": logits},
    "tuple": lambda _, logits: (logits, logits.new_zeros(())),
    "in training alone": lambda network, logits: (logits, None) if network.training else logits,
}


@pytest.mark.parametrize("name", WRAPS)
def test_networks_train_on_their_logits(name):
    network = build_other("a program", SMALL, 0, Returns(WRAPS[name]))
    random_state = torch.get_rng_state()
    inputs = torch.randn(4, 3, 2, 2)
    assert not network.norm.running_mean.any() and (network.norm.running_var == 1).all()
    for training in (True, False):
        outputs = network.train(training)(inputs)
        assert isinstance(outputs, torch.Tensor) and outputs.shape == (4, 3)
    torch.manual_seed(0)
    assert torch.equal(random_state, torch.get_rng_state())  # as if the network had not been tried


@pytest.mark.parametrize("wrap", [lambda n, y: (y, y) if n.training else y, lambda n, y: y[:, :2] if n.training else y])
def test_outputs_that_are_not_known_are_refused_before_training(wrap):
    with pytest.raises(UserError, match=r"expected outputs \(n, 3\)"):
        build_other("a program", SMALL, 0, Returns(wrap))


def test_one_number_of_each_sample_needs_no_axis_of_its_own():
    """Oracle: a step of PyTorch."""
    inputs, targets = torch.randn(12, 5), torch.randn(12)
    trained = nn.Sequential(nn.Linear(5, 1), nn.Flatten(0))
    expected = copy.deepcopy(trained)
    nn.functional.mse_loss(expected(inputs), targets).backward()
    torch.optim.SGD(expected.parameters(), 0.1).step()
    data, optimizer = (inputs, targets), torch.optim.SGD(trained.parameters(), 0.1)
    Session(trained, data, data, optimizer=optimizer, epochs=1, global_batch_size=12).fit()
    assert trained(inputs).shape[0] == 12
    torch.testing.assert_close(trained[0].weight, expected[0].weight)


def test_images_as_targets_are_numbers_in_a_row():
    with pytest.raises(UserError, match=r"expected outputs \(n, 75\) .* received \(n, 3, 5, 5\); flatten them, in the"):
        Session(nn.Conv2d(3, 3, 1), (images := torch.ones(8, 3, 5, 5), images), epochs=1).fit()


def test_a_session_in_a_thread_is_refused():
    with ThreadPoolExecutor(1) as pool, pytest.raises(UserError, match="fit needs the main thread"):
        pool.submit(Session(nn.Linear(5, 3), (IMAGES, IMAGES)).fit).result()


class Grows(nn.Linear):
    """A network that creates a layer in its first pass."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the second layer."""
        self.head = getattr(self, "head", None) or nn.Linear(5, 3)
        return self.head(super().forward(input))


def test_layers_that_the_first_pass_creates_are_refused():
    with pytest.raises(UserError, match="before its first pass, received head.weight, which the pass creates; call"):
        build_other("a program", dataclasses.replace(SMALL, input_shape=(5,), input_type="float32"), 0, Grows(5, 5))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda: torch.set_default_device("meta"), "received meta as the default device"),
        (lambda: torch.set_grad_enabled(False), r"received none, as after set_grad_enabled\(False\); use"),
        (lambda: torch.set_default_dtype(torch.float64), None),
    ],
)
def test_settings_that_a_builder_changes(change, line):
    """PyTorch trains a network of float32 on samples of float32 whatever the default type is."""

    def build(*_):
        network = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
        change()
        return network

    try:
        with pytest.raises(UserError, match=line) if line else nullcontext():
            build_other("a program", SMALL, 0, build)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)


def test_a_head_of_more_classes_than_there_are(capfd):
    """Oracle: a step of PyTorch."""
    inputs, targets = torch.randn(12, 5), torch.arange(12) % 3
    trained = nn.Linear(5, 10)
    expected = copy.deepcopy(trained)
    nn.functional.cross_entropy(expected(inputs), targets).backward()
    torch.optim.SGD(expected.parameters(), 0.1).step()
    data, optimizer = (inputs, targets), torch.optim.SGD(trained.parameters(), 0.1)
    Session(trained, data, data, optimizer=optimizer, epochs=1, global_batch_size=12).fit()
    torch.testing.assert_close(trained.weight, expected.weight)
    assert "has 10 outputs for 3 classes, which count from 0" in capfd.readouterr().err


@pytest.mark.parametrize(("ends_in_softmax", "loss"), [(True, None), (False, None), (True, "nll.py:of_probabilities")])
def test_a_softmax_is_told(ends_in_softmax, loss, capsys):
    """A loss of the user's may expect it."""
    end = (lambda _, logits: logits.softmax(-1)) if ends_in_softmax else (lambda _, logits: logits)
    network = build_other("a program", SMALL, 0, Returns(end))
    check = TrialCheck(pass_state(network), averaged=RUNNING, puts_back=True)
    config = SimpleNamespace(
        model="a program", loss=loss, parallel=SimpleNamespace(num_slices=None, accumulate_steps=1, recompute=False)
    )
    dataset, progress = SimpleNamespace(task="classification"), SimpleNamespace(step=0)
    strategy = SimpleNamespace(num_local_devices=1)
    run = SimpleNamespace(config=config, placement=ALONE, strategy=strategy, dataset=dataset, progress=progress)
    check.check(cast(Any, run))
    assert ("seems to end in a softmax" in capsys.readouterr().err) == (ends_in_softmax and loss is None)


@pytest.mark.parametrize(
    ("name", "side", "weight", "heads"), [("googlenet", 32, 0.3, 2), full("inception_v3", 299, 0.4, 1)]
)
def test_auxiliary_heads_have_their_published_weights(name, side, weight, heads):
    network = build_other(f"torchvision:{name}", Dataset(None, None, (side, side, 3), 3), 0)  # pyright: ignore
    targets, images = torch.tensor([0, 1]), torch.randn(2, 3, side, side)
    outputs = network(images)
    of = nn.functional.cross_entropy
    expected = of(outputs.logits, targets, reduction="sum")
    expected = expected + sum(weight * of(head, targets, reduction="sum") for head in outputs.heads)
    torch.testing.assert_close(with_heads(build_loss("cross-entropy"))(outputs, targets), expected)
    assert len(outputs.heads) == heads and isinstance(network.eval()(images), torch.Tensor)


def test_fsdp_leaves_tied_weights_and_lists_to_the_root():
    network = nn.ModuleDict({name: nn.Linear(3, 3) for name in ("alone", "tied", "tie")})
    network["tie"].weight = network["tied"].weight
    network["list"] = nn.ParameterList([nn.Parameter(torch.ones(3))])
    uses = Counter(id(tensor) for _, tensor in network.named_parameters(remove_duplicate=False))
    assert [name for name, layer in network.items() if stands_alone(layer, uses)] == ["alone"]


def test_fsdp_leaves_layers_that_change_their_inputs_to_the_root():
    """PyTorch forbids it there: "Output 0 of RegisterPostBackwardFunction is a view and is being modified inplace"."""
    first = [nn.Sequential(nn.ReLU(is_inplace), nn.Conv2d(3, 3, 1)) for is_inplace in (False, True)]
    network = build_other("a program", SMALL, 0, nn.Sequential(*first, nn.Flatten(), nn.Linear(12, 3)))
    assert [stands_alone(layer, Counter(map(id, layer.parameters()))) for layer in network[:2]] == [True, False]


def test_fsdp_refuses_a_scalar_by_name():
    network = nn.Linear(3, 3)
    network.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(UserError, match="received scale, a single number; give it the shape"):
        object.__new__(FSDP)._begin(network)
