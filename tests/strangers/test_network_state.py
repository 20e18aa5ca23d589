"""Networks with unusual state and unusual weights, through a resume. Oracle: torch's own loop in one process."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from jobs import HOROVODRUN_GLOO
from ranks import BIN, REPOSITORY, full, run
from stranger_networks import (
    BATCH,
    NETWORKS,
    RATE,
    REFUSED_BY_FSDP,
    SIZE,
    Base,
    Forgetful,
    Hooked,
    X,
    Y,
    assert_same_state,
    expected,
    train_twice,
)
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver
from torch.nn import functional

from allstep.common.base.errors import UserError
from allstep.common.data.datasets import Dataset
from allstep.pytorch import Session
from allstep.pytorch.kept import extra_state
from allstep.pytorch.other_networks import build_other
from allstep.pytorch.strategies.ddp import DDP
from allstep.pytorch.strategies.fsdp import FSDP, layers_of, stands_alone

PROGRAM = REPOSITORY / "tests/strangers/programs/train_networks.py"
SMALL = Dataset(None, None, (6,), 3)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", NETWORKS)
def test_alone(name, tmp_path):
    optimizer = "adam" if name == "Complex" else "sgd"
    found = train_twice(NETWORKS[name], tmp_path, optimizer=optimizer)
    assert_same_state(found, expected(NETWORKS[name](), optimizer))


def train(launcher: tuple, folder: Path, strategy: str, *names: str):
    return run(*launcher, BIN / "python", PROGRAM, folder, strategy, *names)


def test_on_two_ranks_of_horovod(tmp_path):
    result = train((*HOROVODRUN_GLOO, 2), tmp_path, "horovod", *NETWORKS)
    assert result.returncode == 0, result.output
    assert result.stdout.count("as in one process") == 2 * len(NETWORKS)


@pytest.mark.parametrize("strategy", [full("ddp"), "fsdp"])
def test_on_two_ranks_of_torchrun(strategy, tmp_path):
    refused = {"ddp": ("Sparse",), "fsdp": REFUSED_BY_FSDP}[strategy]
    names = [name for name in NETWORKS if name not in refused]
    result = run("torchrun", "--nproc-per-node", "2", PROGRAM, tmp_path, strategy, *names)
    assert result.returncode == 0, result.output
    assert result.stdout.count("as in one process") == 2 * len(names)


def test_ddp_refuses_sparse_gradients_by_name():
    with pytest.raises(UserError, match="needs dense gradients, table has sparse ones; build it with sparse=False"):
        object.__new__(DDP).reduce(NETWORKS["Sparse"](), None)  # pyright: ignore


@pytest.mark.full
def test_compiled(tmp_path):
    names = ("Named", "Pair", "Heads", "Buffers", "Complex")
    result = train((), tmp_path, "single", *names, "--compile")
    assert result.returncode == 0, result.output
    assert result.stdout.count("as in one process") == len(names)


class Odd(Base):
    def more(self) -> None:
        """Leave it to the tests."""


def with_buffer(value: torch.Tensor) -> nn.Module:
    network = Odd()
    network.register_buffer("odd", value)
    return network


def with_module(module: nn.Module) -> nn.Module:
    network = Odd()
    network.odd = module
    return network


def ragged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(6), torch.ones(2)])


def with_part() -> nn.Module:
    """Return a network with a weight that is a view of another one, with gaps."""
    network = Odd()
    network.odd = nn.Parameter(network.b.weight.data[:, :3])
    return network


def with_extra_state(value: object) -> nn.Module:
    return type("Extra", (Odd,), {"get_extra_state": lambda _: value, "set_extra_state": lambda *_: None})()


def with_entry(network: nn.Module) -> nn.Module:
    network.register_state_dict_post_hook(lambda _self, state, prefix, _local: state.update({f"{prefix}odd": "text"}))
    return network


class DistributedDataParallel(nn.Sequential):
    """Named as torch's wrapper, which needs ranks."""


REFUSED = {
    "wrapped": (lambda: with_module(DistributedDataParallel(nn.Linear(6, 6))), "received odd in a DistributedDataP"),
    "sparse": (lambda: with_buffer(torch.eye(3).to_sparse()), "cannot hold odd of .* a sparse or nested tensor"),
    "nested": (lambda: with_buffer(ragged()), "cannot hold odd of .* a sparse or nested tensor; register it"),
    "narrow": (lambda: with_buffer(torch.ones(2).to(torch.float8_e5m2)), "cannot hold odd of .*of float8_e5m2"),
    "set": (lambda: with_extra_state({1: {2}}), "cannot hold _extra_state of .*, in which is a value of type set"),
    "text": (lambda: with_entry(Odd()), "expected tensors in state_dict.. of .*, received odd of type str"),
    "unused": (lambda: with_module(nn.LazyLinear(6)), "all lazy layers of .* to be used, received odd, whose shapes"),
    "bfloat16": (lambda: Odd().bfloat16(), "as a.weight in bfloat16; convert .* give --precision bf16"),
    "float64": (lambda: Odd().double(), "as a.weight in float64; convert them by .float"),
    "part": (lambda: with_part(), "received odd and b.weight, one a part of the other; compute the part in forward"),
    "one layer": (lambda: nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3).half()), "as 1.weight in float16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_training(name):
    build, expected_line = REFUSED[name]
    with pytest.raises(UserError, match=expected_line):
        build_other("a program", SMALL, 0, build())


def test_a_trial_leaves_nothing_behind():
    network = build_other("a program", SMALL, 0, Forgetful())
    assert network.calls == 0 and not network.seen
    assert torch.equal(network.generator.get_state(), torch.Generator().manual_seed(3).get_state())
    network, untouched = NETWORKS["ExtraState"](), NETWORKS["ExtraState"]()
    build_other("a program", SMALL, 0, network)
    assert network.calls == untouched.calls == 0
    network = build_other("a program", SMALL, 0, NETWORKS["Buffers"]())
    assert_same_state(network, NETWORKS["Buffers"]())


class ActivationNorm(Base):
    """A network that sets a weight from its first samples."""

    def more(self) -> None:
        self.shift = nn.Parameter(torch.zeros(6))
        self.register_buffer("has_begun", torch.tensor(False))

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.training and not self.has_begun:
            with torch.no_grad():
                self.shift.copy_(-hidden.mean(0))
                self.has_begun.fill_(True)
        return hidden + self.shift


def test_weights_set_from_the_first_samples(tmp_path):
    assert_same_state(train_twice(ActivationNorm, tmp_path / "a", optimizer="sgd"), expected(ActivationNorm(), "sgd"))
    with pytest.raises(UserError, match="sets shift from its first samples, of which each rank or pass would see a"):
        train_twice(ActivationNorm, tmp_path / "b", accumulate_steps=2)


@pytest.mark.parametrize("name", ["Buffers", "ExtraState", "Averages"])
def test_several_passes_begin_alike(name, tmp_path):
    """State that does not depend on samples changes once a step."""
    found = train_twice(NETWORKS[name], tmp_path / "a", optimizer="sgd", accumulate_steps=2)
    assert_same_state(found, expected(NETWORKS[name](), "sgd"))
    with pytest.raises(UserError, match="changes .* in each pass, of which --slices takes several a step"):
        train_twice(NETWORKS[name], tmp_path / "b", slices=2)


class Codebook(Base):
    """Vectors that follow the samples nearest to them (van den Oord et al. 2017)."""

    def more(self) -> None:
        self.register_buffer("vectors", torch.randn(5, 6))

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(hidden, self.vectors).argmin(1)
        if self.training:
            self.vectors.index_add_(0, nearest, 0.1 * (hidden.detach() - self.vectors[nearest]))
        return hidden + (self.vectors[nearest] - hidden).detach()


class Usage(Base):
    """A count of samples by what they are."""

    def more(self) -> None:
        self.register_buffer("counts", torch.zeros(6, dtype=torch.int64))

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        self.counts += hidden.argmax(1).bincount(minlength=6) * self.training
        return hidden


@pytest.mark.parametrize(("build", "name"), [(Codebook, "vectors"), (Usage, "counts")])
def test_state_that_depends_on_samples(build, name, tmp_path):
    assert_same_state(train_twice(build, tmp_path / "a", optimizer="sgd"), expected(build(), "sgd"))
    with pytest.raises(UserError, match=f"changes {name} by the samples of each pass, of which each rank or pass"):
        train_twice(build, tmp_path / "b", accumulate_steps=2)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
def test_a_script_is_validated():
    """Its outputs may require gradients where torch computes none."""
    network = torch.jit.script(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    assert Session(network, (X, Y), (X, Y), epochs=2, global_batch_size=SIZE).fit()[-1]["validation_loss"] > 0


class Observed(Base):
    """Scales of quantization, whose number is known after the first pass."""

    def more(self) -> None:
        observer = MovingAveragePerChannelMinMaxObserver
        self.quantised = FakeQuantize(observer, dtype=torch.qint8, qscheme=torch.per_channel_symmetric, ch_axis=0)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden, self.quantised(self.b.weight))


def test_buffers_that_get_their_shapes_in_a_pass(tmp_path):
    """Validation changes them as well, in PyTorch's own loops too."""
    undisturbed = Observed()
    Session(undisturbed, (X, Y), (X, Y), epochs=2, base_lr=RATE, global_batch_size=BATCH, weight_decay=0.0).fit()
    found = train_twice(Observed, tmp_path, optimizer="sgd")
    assert found.quantised.scale.shape == (6,)  # pyright: ignore[reportAttributeAccessIssue]
    assert_same_state(found, undisturbed)


class Draws(Base):
    """A layer whose noise is NumPy's, and which Python's generator leaves out at times."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        noise = torch.from_numpy(np.random.random(6).astype(np.float32))
        return hidden * noise if random.random() < 0.5 else hidden


def test_draws_of_python_and_numpy_go_on_as_if_undisturbed(tmp_path):
    undisturbed = Draws()
    Session(undisturbed, (X, Y), (X, Y), epochs=2, base_lr=RATE, global_batch_size=BATCH, weight_decay=0.0).fit()
    assert_same_state(train_twice(Draws, tmp_path, optimizer="sgd"), undisturbed)


def test_slices(tmp_path):
    found = train_twice(NETWORKS["Layouts"], tmp_path / "a", optimizer="adam", slices=4)
    assert_same_state(found, expected(NETWORKS["Layouts"](), "adam"))
    with pytest.raises(UserError, match="received filter, which is complex; leave --slices out"):
        train_twice(NETWORKS["Complex"], tmp_path / "b", slices=2)


def test_extra_state_of_another_length(tmp_path):
    longer = type("Longer", (NETWORKS["ExtraState"],), {"more": lambda self: setattr(self, "calls", 7)})
    assert_same_state(train_twice(longer, tmp_path, optimizer="sgd"), expected(longer(), "sgd"))


def test_lazy_layers_have_weights_after_the_trial():
    network = build_other("a program", SMALL, 0, nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.Linear(5, 3)))
    first, norm, _ = network.children()
    assert first.weight.shape == (5, 6) and first.in_features == 6
    assert not norm.running_mean.any()  # pyright: ignore[reportCallIssue]


def test_fsdp_knows_how_weights_are_used():
    """FSDP cuts what a layer's own forward alone uses."""
    alone = {
        "Outside": {"a", "head"},
        "Tied": {"head"},
        "Calls": {"a", "b", "head", "lstm", "attention"},
        "Containers": {"a", "b", "head", "0", "last"},
        "Slopes": {"head"},
    }
    for name, expected_layers in alone.items():
        network = build_other("a program", SMALL, 0, NETWORKS[name]())
        uses = Counter(id(tensor) for _, tensor in network.named_parameters(remove_duplicate=False))
        names = {module: path.rpartition(".")[2] for path, module in network.named_modules()}
        assert {names[layer] for layer in layers_of(network) if stands_alone(layer, uses)} == expected_layers


class Merges(Base):
    """A network that adds small weights to large ones for validation, as loralib's layers do."""

    def train(self, mode: bool = True) -> nn.Module:
        self.b.weight.data += (self.training - mode) * self.a.weight.data
        return super().train(mode)


def viewed() -> nn.Module:
    network = Odd()
    network.odd = nn.Parameter(network.b.weight.data.t())
    return network


MORE = {
    "merged": (Merges, "received b.weight, which the network changes by itself, when ranks have copies"),
    "view": (viewed, "received b.weight and odd, which share it, and would not once they are cut"),
    "script": (lambda: torch.jit.script(Base()), "received the network, a script, whose weights cannot be exchanged"),
    "nothing": (lambda: with_module(nn.Linear(0, 6)), "received odd.weight, which has none; leave it out"),
}


@pytest.mark.parametrize("name", [*REFUSED_BY_FSDP, *MORE])
def test_fsdp_refuses_by_name(name):
    build, line = MORE[name] if name in MORE else (NETWORKS[name], REFUSED_BY_FSDP[name])
    network = build_other("a program", SMALL, 0, build())
    with pytest.raises(UserError, match=line):
        object.__new__(FSDP)._begin(network)


def test_fsdp_refuses_hooks_of_gradients():
    with pytest.raises(UserError, match="received hooks of b.weight, which shards replace; remove them"):
        object.__new__(FSDP)._begin(build_other("a program", SMALL, 0, Hooked()))


@pytest.mark.parametrize("damaged", [b"{", b'{"tensor": ["hub", [2], ""]}', b'{"odd": 1}', b'{"array": ["O", [], ""]}'])
def test_damaged_extra_state(damaged):
    with pytest.raises(UserError, match="extra state in the checkpoint is damaged"):
        extra_state.decode(torch.frombuffer(bytearray(damaged), dtype=torch.uint8))
