"""Networks as other people write them, whose state or use of weights is unusual, and PyTorch's own loop for them.

Oracle of each: `expected`, torch's optimizer on the whole batches in one process.
"""

# pyright: reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# Buffers and submodules have no types.
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torchvision.models.googlenet import GoogLeNetOutputs

from allstep.common.data.sharding import sample_order

SIZE, BATCH, EPOCHS, RATE = 24, 8, 2, 0.05
_random = np.random.default_rng(0)
X, Y = _random.normal(size=(SIZE, 6)).astype(np.float32), np.arange(SIZE) % 3


class Base(nn.Module):
    """Two layers, between which and a head each network has its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.more()

    def more(self) -> None:
        """Add layers, weights and buffers."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute what is between the layers and the head."""
        return hidden

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.between(torch.tanh(self.b(torch.tanh(self.a(inputs))))))


class Buffers(Base):
    """Buffers of many types: counters, flags, infinite constants, one by `expand`, a sparse and a nested one."""

    def more(self) -> None:
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("has_begun", torch.tensor(False))
        self.register_buffer("small", torch.ones(6, dtype=torch.int16))
        self.register_buffer("tiny", torch.ones(6, dtype=torch.uint8))
        self.register_buffer("unsigned", torch.zeros((), dtype=torch.uint16))
        self.register_buffer("precise", torch.full((6,), 0.1, dtype=torch.float64))
        self.register_buffer("brain", torch.full((6,), 0.1, dtype=torch.bfloat16))
        self.register_buffer("phase", torch.full((6,), 1j))
        self.register_buffer("mask", torch.triu(torch.full((6, 6), float("-inf")), 1))
        self.register_buffer("nothing", torch.full((2,), float("nan")))
        self.register_buffer("lowest", torch.tensor(float("inf")))
        self.register_buffer("wide", torch.full((1, 6), 0.5).expand(4, 6))
        self.register_buffer("left_out", torch.ones(1).expand(6), persistent=False)
        self.register_buffer("sparse", torch.eye(6).to_sparse(), persistent=False)
        self.register_buffer("ragged", torch.nested.nested_tensor([torch.ones(6), torch.ones(2)]), persistent=False)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps = self.steps + 1  # another tensor takes its place
            self.unsigned.copy_(self.steps)
            self.has_begun.fill_(True)
            self.lowest.clamp_(max=1.0)
        hidden = hidden * (1 + 0.1 * self.steps) * (1 + self.has_begun.float()) * self.lowest.clamp(max=2.0)
        hidden = hidden * self.small * self.tiny * self.wide[0] * self.left_out * self.phase.imag
        hidden = hidden * (1 + 0.1 * self.unsigned.float()) * self.ragged[0]
        hidden = hidden + self.precise.float() + self.brain.float()
        shares = (hidden[:, :, None] * hidden[:, None, :] + self.mask).softmax(-1)
        return torch.sparse.mm(self.sparse, (shares @ hidden[:, :, None])[..., 0].t()).t()


class ExtraState(Base):
    """A counter of Python's, which `get_extra_state` returns beside others."""

    def more(self) -> None:
        self.calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "more": (1, 2.5, float("inf"), None, b"x"), 3: [torch.arange(3), np.ones(2)]}

    def set_extra_state(self, state: Any) -> None:
        assert state["more"] == (1, 2.5, float("inf"), None, b"x") and torch.equal(state[3][0], torch.arange(3))
        self.calls = state["calls"]

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return hidden * (1 + 0.1 * self.calls)


class Complex(Base):
    """A filter with complex weights."""

    def more(self) -> None:
        self.filter = nn.Parameter(torch.randn(6, dtype=torch.complex64))

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.fft.ifft(torch.fft.fft(hidden) * self.filter).real


class Layouts(Base):
    """Weights that do not lie in memory in the order of their axes, or have gaps."""

    def more(self) -> None:
        self.gaps = nn.Parameter(torch.randn(6, 12)[:, ::2])
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.conv = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)
        parametrizations.orthogonal(self.a)
        parametrizations.weight_norm(self.b)
        self.integers = nn.Parameter(torch.arange(6).flip(0), requires_grad=False)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        pictures = hidden.view(-1, 2, 3, 1).expand(-1, -1, -1, 3)
        hidden = hidden + self.conv(pictures).mean((1, 2, 3))[:, None] + hidden @ self.gaps
        return hidden[:, self.integers] + (hidden @ self.turned).sum(1, keepdim=True)


class Tied(Base):
    """Weights that several layers share."""

    def more(self) -> None:
        self.b.weight = self.a.weight
        self.deep = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.deep[0].weight = self.a.weight
        self.scale = nn.Parameter(torch.ones(6))

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.deep(hidden) * self.scale


class Encoder(nn.Module):
    """A layer that is used by another method than `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(6))

    def encode(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs) * self.scale


class Outside(Base):
    """Weights that are used outside of their layer's forward."""

    def more(self) -> None:
        self.encoder, self.decoder = Encoder(), nn.Linear(6, 6)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = functional.linear(self.encoder.encode(hidden), self.b.weight)
        return self.decoder(hidden) @ self.decoder.weight.T


class Containers(Base):
    """Lists and dictionaries of parameters and layers."""

    def more(self) -> None:
        self.listed = nn.ParameterList([nn.Parameter(torch.ones(6)), nn.Parameter(torch.randn(6, 6))])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.randn(6))})
        self.layers = nn.ModuleList([nn.Linear(6, 6)])
        self.by_name = nn.ModuleDict({"last": nn.Linear(6, 6)})

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[0](hidden * self.listed[0] @ self.listed[1] + self.named["shift"])
        return self.by_name["last"](hidden)


class Wrapping(nn.Module):
    """A layer whose output is an object."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, inputs: torch.Tensor) -> object:
        return type("Output", (), {"hidden": self.linear(inputs)})


class Calls(Base):
    """Layers that are called twice, return objects, or reach their weights by lists of their own."""

    def more(self) -> None:
        self.wrapping, self.lstm = Wrapping(), nn.LSTM(6, 6, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.wrapping(self.b(self.b(hidden))).hidden
        hidden, _ = self.lstm(hidden[:, None, :].expand(-1, 3, -1))
        return self.attention(hidden, hidden, hidden)[0].mean(1)


class Slopes(Base):
    """The derivative of an energy by its inputs, as force fields have it, and a layer that sees samples one by one."""

    def more(self) -> None:
        self.energy, self.each = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), nn.Linear(6, 6)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            inputs = hidden if hidden.requires_grad else hidden.requires_grad_()
            (forces,) = torch.autograd.grad(self.energy(inputs).sum(), inputs, create_graph=True)
        return torch.vmap(self.each)(hidden + forces)


class Scalar(Base):
    """A single number as a weight."""

    def more(self) -> None:
        self.scale = nn.Parameter(torch.tensor(1.5))

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.scale


class Listed(Base):
    """A weight that a list of Python's holds as well."""

    def more(self) -> None:
        self.weights = [self.b.weight]

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden, self.weights[0])


class Averages(Base):
    """A teacher whose weights follow the others, and a layer with the largest singular value of 1."""

    def more(self) -> None:
        self.teacher = nn.Linear(6, 6).requires_grad_(False)
        self.teacher.load_state_dict(self.b.state_dict())
        parametrizations.spectral_norm(self.a)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.b.weight, 0.1)
        return hidden + self.teacher(hidden)


class Norms(Base):
    """Batch norms without a shift, and with a momentum that is none; both count batches."""

    def more(self) -> None:
        self.norm, self.cumulative = nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=None)
        self.norm.register_parameter("bias", None)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.cumulative(self.norm(hidden))


class Sparse(Base):
    """Sparse gradients."""

    def more(self) -> None:
        self.table = nn.Embedding(6, 6, sparse=True)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.table(hidden.argmax(1) // 2)


class Named(Base):
    """Logits in an object, beside others."""

    def forward(self, inputs: torch.Tensor) -> Any:
        return SimpleNamespace(logits=super().forward(inputs), hidden_states=inputs)


class Pair(Base):
    """Logits and another loss, in training alone."""

    def forward(self, inputs: torch.Tensor) -> Any:
        logits = super().forward(inputs)
        return (logits, None, {"aux": logits.new_zeros(())}) if self.training else logits


class Heads(Base):
    """Auxiliary heads in training, as torchvision's GoogLeNet has them."""

    def more(self) -> None:
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> Any:
        logits = super().forward(inputs)
        return GoogLeNetOutputs(logits, self.first(inputs), self.second(inputs)) if self.training else logits


NETWORKS = {
    one.__name__: one
    for one in (
        *(Buffers, ExtraState, Complex, Layouts, Tied, Outside, Containers, Calls, Scalar, Listed),
        *(Slopes, Averages, Norms, Sparse, Named, Pair, Heads),
    )
}
REFUSED_BY_FSDP = {
    "Averages": "received teacher.weight, which the network changes by itself",
    "Sparse": "received table, which has sparse ones; build it with sparse=False",
    "Scalar": "received scale, a single number",
    "Listed": "received b.weight, which the network uses through a variable",
}


def expected(network: Any, optimizer: str) -> nn.Module:
    """Train by a plain loop."""
    weights = [one for one in network.parameters() if one.requires_grad]
    options = {"momentum": 0.9} if optimizer == "sgd" else {}
    steps = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer](weights, lr=RATE, **options)
    for epoch in range(EPOCHS):
        order = sample_order(np.arange(SIZE), SIZE, seed=0, epoch=epoch)
        for begin in range(0, SIZE, BATCH):
            chosen = order[begin : begin + BATCH]
            steps.zero_grad()
            outputs, targets = network(torch.from_numpy(X[chosen])), torch.from_numpy(Y[chosen])
            heads = [(1.0, outputs)]
            if isinstance(outputs, GoogLeNetOutputs):
                heads = [(1.0, outputs.logits), (0.3, outputs.aux_logits1), (0.3, outputs.aux_logits2)]
            elif isinstance(outputs, tuple):
                heads = [(1.0, outputs[0])]
            elif isinstance(outputs, SimpleNamespace):
                heads = [(1.0, outputs.logits)]
            sum(weight * functional.cross_entropy(logits, targets) for weight, logits in heads).backward()
            steps.step()
    return network


def train_twice(build: Any, folder: Any, **flags: Any) -> nn.Module:
    """Train one epoch, then go on from the checkpoint with another network of the same class; return that."""
    from allstep.pytorch import Session

    flags = {"base_lr": RATE, "global_batch_size": BATCH, "weight_decay": 0.0, "output_dir": folder, **flags}
    flags["sync_batch_norm"] = build is Norms and flags.get("strategy", "single") != "single"
    Session(build(), (X, Y), (X, Y), epochs=1, **flags).fit()
    network = build()
    Session(network, (X, Y), (X, Y), epochs=EPOCHS, resume="latest", **flags).fit()
    return network


def assert_same_state(network: nn.Module, other: nn.Module) -> None:
    """Compare all that two networks' `state_dict()` have."""
    found, wanted = network.state_dict(), other.state_dict()
    assert list(found) == list(wanted)
    for name, value in found.items():
        if name.endswith("_extra_state"):
            assert str(value) == str(wanted[name])
            continue
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert value.dtype == wanted[name].dtype, name
        torch.testing.assert_close(
            value, wanted[name], rtol=1e-3, atol=1e-4, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )


class Forgetful(Base):
    """A counter of Python's that checkpoints lack, and a generator of its own."""

    def more(self) -> None:
        self.calls, self.generator, self.seen = 0, torch.Generator().manual_seed(3), list[int]()

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        self.seen.append(self.calls)
        return hidden * (1 + 0.1 * self.calls) * torch.rand(6, generator=self.generator)


class Hooked(Base):
    """A network that changes a gradient by itself."""

    def more(self) -> None:
        self.b.weight.register_hook(lambda gradient: gradient / 2)
