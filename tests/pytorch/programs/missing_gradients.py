"""Networks whose weights lack gradients, on the ranks at hand; run by test_missing_gradients.py.

    python missing_gradients.py DIRECTORY OPTIMIZER [FLAG=VALUE ...]

One layer is never used; one is used from the third step on; one only for samples of class 0, which few ranks have; one
is frozen at first and trained from the fourth step on, another the other way round. Oracle: torch's own loop in one
process over the whole batches. With resume=true the run stops after the second step and goes on in another process.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from torch import nn

from allstep.common.data.sharding import sample_order
from allstep.common.training.hooks import Hook
from allstep.pytorch import Session

DIRECTORY, OPTIMIZER, *flags = sys.argv[1:]
FLAGS = {name: json.loads(value) for name, _, value in (flag.partition("=") for flag in flags)}
SIZE, BATCH, EPOCHS, DECAY, RATE = 24, 8, 3, 0.1, 0.05
random = np.random.default_rng(0)
X, Y = random.normal(size=(SIZE, 6)).astype(np.float32), (np.arange(SIZE) % 8 > 0).astype(np.int64) + 0
FREE = {"always", "rare", "late", "idle", "head", "first", "then"}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in ("always", "rare", "late", "idle", "first", "then"):
            setattr(self, name, nn.Linear(6, 6))
        self.head = nn.Linear(6, 2)
        self.step = 1
        self.freeze()

    def freeze(self) -> None:
        """Choose which weights the next step trains."""
        self.first.requires_grad_(self.step < 4)
        self.then.requires_grad_(self.step >= 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.always(self.then(self.first(inputs))))
        if self.step >= 3:
            hidden = hidden + self.late(hidden)
        is_rare = inputs[:, 0] > 1.2
        if is_rare.any():
            hidden = hidden + is_rare[:, None] * self.rare(inputs)
        return self.head(hidden)


class Freezing(Hook):
    def __init__(self, network: Network) -> None:
        self.network = network

    def on_start(self, session) -> None:
        self.network.step = session.progress.step + 1
        self.network.freeze()

    on_step = on_start


def expected() -> Network:
    network = Network()
    weights = list(network.parameters())
    groups = [
        {"params": [one for one in weights if one.ndim > 1], "weight_decay": DECAY},
        {"params": [one for one in weights if one.ndim <= 1], "weight_decay": 0.0},
    ]
    kinds = {
        "sgd": lambda: torch.optim.SGD(groups, lr=RATE, momentum=0.9),
        "nesterov": lambda: torch.optim.SGD(groups, lr=RATE, momentum=0.9, nesterov=True),
        "adam": lambda: torch.optim.Adam(groups, lr=RATE),
        "adamw": lambda: torch.optim.AdamW(groups, lr=RATE),
        "rmsprop": lambda: torch.optim.RMSprop(groups, lr=RATE),
        "adagrad": lambda: torch.optim.Adagrad(groups, lr=RATE),
    }
    optimizer = kinds[OPTIMIZER]()
    for epoch in range(EPOCHS):
        order = sample_order(np.arange(SIZE), SIZE, seed=0, epoch=epoch)
        for begin in range(0, SIZE, BATCH):
            chosen = order[begin : begin + BATCH]
            network.zero_grad()
            loss = nn.functional.cross_entropy(network(torch.from_numpy(X[chosen])), torch.from_numpy(Y[chosen]))
            loss.backward()
            optimizer.step()
            network.step += 1
            network.freeze()
    return network


if __name__ == "__main__":
    found = Network()
    FLAGS = {"epochs": EPOCHS, "base_lr": RATE, "weight_decay": DECAY, "global_batch_size": BATCH, **FLAGS}
    parts = {"optimizer": OPTIMIZER, "hooks": [Freezing(found)], "output_dir": DIRECTORY}
    Session(found, (X, Y), (X, Y), **parts, **FLAGS).fit()
    if FLAGS["epochs"] == EPOCHS:
        oracle = expected()
        for (name, one), other in zip(found.named_parameters(), oracle.parameters(), strict=True):
            np.testing.assert_allclose(one.detach().numpy(), other.detach().numpy(), 1e-4, 1e-5, err_msg=name)
        assert torch.equal(found.idle.weight, Network().idle.weight)
        print("as in one process", flush=True)
