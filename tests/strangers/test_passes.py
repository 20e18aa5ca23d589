"""Effects of passes beyond outputs: state, hooks, samples computed together. Oracle: torch's own loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torchvision
from stranger_networks import (
    BATCH,
    EPOCHS,
    RATE,
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
from torch.nn.utils import prune

from allstep.common.base.errors import UserError
from allstep.common.data.datasets import Dataset
from allstep.pytorch import Session
from allstep.pytorch.kept.pass_state import pass_state
from allstep.pytorch.other_networks import build_other

SMALL = Dataset(None, None, (6,), 3)  # pyright: ignore[reportArgumentType]


class Observer(Base):
    """A list of means that nothing is computed with."""

    def more(self) -> None:
        self.seen = list[float]()

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen.append(float(hidden.mean()))
        return hidden


class Scratch(Base):
    """A buffer that each pass sets before it computes with it, as snnTorch's neurons have."""

    def more(self) -> None:
        self.register_buffer("membrane", torch.zeros(0), persistent=False)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        self.membrane = torch.zeros_like(hidden)
        self.membrane = self.membrane + hidden
        return self.membrane


def test_state_that_no_pass_needs_from_the_last_one_may_differ_on_ranks():
    assert pass_state(build_other("a program", SMALL, 0, Scratch())).scratch == {"membrane"}


class Coupled(Base):
    """A network that compares the samples of a batch."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden - hidden.mean(0)


class Needed(Base):
    """A network that changes in place what its backward pass needs."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.mul_(2)


class Series(Base):
    """A network that takes the samples of a batch for a series, as recurrent layers without a batch axis do."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + hidden.cumsum(0)


class Experts(Base):
    """Experts with room for a few samples of a batch; those that come later pass by."""

    def more(self) -> None:
        self.router, self.experts = nn.Linear(6, 4), nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen, room = self.router(hidden).argmax(1), max(1, len(hidden) // 2)
        outputs = hidden.clone()
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == number).flatten()[:room]
            outputs[rows] = expert(hidden[rows])
        return outputs


class Clamped(Base):
    """A network that changes gradients of activations by their size."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient / gradient.norm())
        return hidden


class Halved(Base):
    """A network that changes gradients after they were added to those of the passes before."""

    def more(self) -> None:
        self.b.weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", weight.grad / 2))


class Backward(Base):
    """A network that counts its backward passes."""

    def more(self) -> None:
        self.register_buffer("passes", torch.tensor(0))
        self.b.register_full_backward_hook(self.count)

    def count(self, *_: object) -> None:
        self.passes += 1


class Centred(Base):
    """A network that takes the mean over the samples from gradients."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient - gradient.mean(0))
        return hidden


class Felt(Base):
    """A network that remembers the size of a gradient."""

    def more(self) -> None:
        self.register_buffer("size", torch.tensor(0.0))
        self.b.register_full_backward_hook(self.feel)

    def feel(self, _module: nn.Module, _inputs: object, outputs: tuple[torch.Tensor]) -> None:
        self.size.copy_(outputs[0].norm())


class Frequent(Base):
    """Vectors whose gradients are divided by how often the samples of a pass take them."""

    def more(self) -> None:
        self.vectors = nn.Embedding(6, 6, scale_grad_by_freq=True)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.vectors(hidden.argmax(1))


class Limited(Frequent):
    """Vectors that a pass shortens if a sample takes them."""

    def more(self) -> None:
        self.vectors = nn.Embedding(6, 6, max_norm=0.5)


class Remembers(Base):
    """A pair of tensors from the samples before, as a recurrent network keeps its state."""

    def more(self) -> None:
        self.memory = [(torch.zeros(6), torch.ones(6))]

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        mean, scale = self.memory[0]
        if self.training:
            self.memory[0] = hidden.detach().mean(0), hidden.detach().abs().amax(0)
        return hidden * scale - mean


class Counter:
    """An object that counts, as a schedule or a queue of a network's does."""

    number = 0


class Schedules(Base):
    """A network that keeps a count in an object."""

    def more(self) -> None:
        self.counter = Counter()

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        self.counter.number += self.training
        return hidden * (1 + 0.1 * self.counter.number)


class Masked(Base):
    """Weights and a loss that each pass computes anew; and a mode that `train` sets, which returns nothing."""

    def more(self) -> None:
        prune.l1_unstructured(self.b, "weight", 0.5)

    def train(self, mode: bool = True) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().train(mode)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        self.loss = hidden.square().mean()
        return hidden


class Detached(Base):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs).detach()


class InNumPy(Base):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs).numpy(force=True)  # pyright: ignore[reportReturnType]


class Noisy(Base):
    """A layer that adds noise from a generator of its own."""

    def more(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.randn(hidden.shape, generator=self.generator)


class Shaken(Noisy):
    """A network whose generator draws one number a batch."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * (1 + torch.rand(1, generator=self.generator)) if self.training else hidden


class Counted(Base):
    """A network that counts the samples it has seen."""

    def more(self) -> None:
        self.register_buffer("samples", torch.zeros(()))

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.samples += len(hidden)
        return hidden * (1 + 0.01 * self.samples)


class Weighs(Base):
    """A network that scales by the number of samples."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * len(hidden)


class Waves(Base):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * 1j


@pytest.mark.parametrize(
    ("build", "passes", "line"),
    [
        (Masked, 1, ""),
        (Schedules, 1, "changes counter in training, which checkpoints lack, so that --resume will be refused"),
        (Forgetful, 1, "changes calls in training, which checkpoints lack, so that --resume will be refused; keep it"),
        (Observer, 1, "changes seen in training, which checkpoints lack; keep it in a buffer"),
        (Coupled, 1, ""),
        (Hooked, 1, ""),
        (Hooked, 2, "has hooks for the gradient of b.weight, which see that of each rank or pass"),
    ],
)
def test_what_is_told(build, passes, line, capfd):
    network = build()
    Session(network, (X, Y), (X, Y), epochs=1, base_lr=RATE, global_batch_size=BATCH, accumulate_steps=passes).fit()
    err = capfd.readouterr().err
    assert line in err and err.count("warning") == bool(line)


@pytest.mark.parametrize(
    ("build", "passes", "line"),
    [
        (Detached, 1, "outputs that change with the network's weights, received outputs without a gradient"),
        (InNumPy, 1, "received outputs without a gradient"),
        (Needed, 1, "needed for gradient computation has been modified by an inplace operation"),
        (Waves, 1, "expected floating-point numbers as outputs of --model .*, received torch.complex64"),
        (Coupled, 2, "computes outputs of a sample from other samples of its batch, of which each rank or pass would"),
        (Weighs, 2, "computes outputs of a sample from other samples of its batch"),
        (Series, 2, "computes outputs of a sample from other samples of its batch"),
        (Experts, 2, "computes outputs of a sample from other samples of its batch"),
        (Clamped, 2, "changes gradients by their size, as hooks do that clamp or normalise them"),
        (Halved, 2, "changes gradients by their size"),
        (Centred, 2, "or by the other samples"),
        (Frequent, 2, "or by the other samples, as scale_grad_by_freq does"),
        (Limited, 2, "changes vectors.weight by the samples of each pass, of which each rank or pass"),
        (Felt, 2, "changes size by the samples of each pass, of which each rank or pass"),
        (Noisy, 2, "changes generator by the samples of each pass, of which each rank or pass"),
        (Counted, 2, "changes samples by the samples of each pass, of which each rank or pass"),
        (Remembers, 2, "changes memory by the samples of each pass, of which each rank or pass"),
        (Remembers, 1, "computes with memory, which it changes in training and checkpoints lack: a"),
        (Forgetful, 1, "computes with calls, which it changes in training and checkpoints lack: a"),
    ],
)
def test_what_is_refused(build, passes, line, tmp_path):
    with pytest.raises(UserError, match=line):
        train_twice(build, tmp_path, optimizer="sgd", accumulate_steps=passes)


@pytest.mark.parametrize(("build", "name"), [(Backward, "passes"), (Schedules, "counter"), (Observer, "seen")])
def test_what_recomputing_would_change_again_is_refused(build, name, tmp_path):
    with pytest.raises(UserError, match=f"changes {name} in each pass, which --recompute would do twice a pass; leave"):
        train_twice(build, tmp_path, optimizer="sgd", recompute=True)


class Overwrites(Base):
    """A network that changes its inputs in place."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs.mul_(2))


def attention() -> nn.Module:
    """Return a network with biases that have no effect, whose gradients are rounding errors."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Linear(3, 6), layer, nn.Flatten(), nn.Linear(12, 3))


class Brain(Base):
    """A network that computes in bfloat16 by itself."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(inputs)


@pytest.mark.parametrize(
    ("build", "passes"),
    [
        (Frequent, 1),
        (Halved, 1),
        (Remembers, 1),
        (Schedules, 1),
        (Schedules, 2),
        (Masked, 2),
        (Counted, 1),
        (Shaken, 2),
        (Overwrites, 2),
        (attention, 2),
        (Backward, 2),
    ],
)
def test_trained_as_in_torch(build, passes):
    found = build()
    flags = {"epochs": EPOCHS, "base_lr": RATE, "global_batch_size": BATCH, "weight_decay": 0.0}
    Session(found, (X, Y), (X, Y), accumulate_steps=passes, **flags).fit()
    assert_same_state(found, expected(build(), "sgd"))


def vanishing() -> nn.Module:
    """Return a network whose gradients are so small that digits are lost."""
    return torchvision.models.efficientnet_b0(num_classes=3, dropout=0.0, stochastic_depth_prob=0.0)


@pytest.mark.parametrize(("build", "dataset"), [(Brain, SMALL), (vanishing, replace(SMALL, input_shape=(32, 32, 3)))])
def test_rounding_errors_are_no_change_of_gradients(build, dataset):
    network = build_other("a program", dataset, 0, build())
    assert not pass_state(network).has_nonlinear_gradients and not pass_state(network).couples_samples


@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_that_hooks_change_are_seen_for_every_strategy(sharded):
    network = Base()
    next(network.parameters()).register_hook(torch.sign)
    assert pass_state(build_other("a program", SMALL, 0, network, sharded=sharded)).has_nonlinear_gradients


def test_a_loss_in_whole_numbers_is_refused():
    def whole(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return outputs.sum().long()

    with pytest.raises(UserError, match=r"expected whole\(\) of --loss to return the mean loss.* received torch.int64"):
        Session(Base(), (X, Y), (X, Y), epochs=1, base_lr=RATE, global_batch_size=BATCH, loss=whole).fit()
