"""Settings that a user's hooks change during training. Oracle: the undisturbed run."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
import torch
from torch import nn

from allstep.common.base.errors import UserError
from allstep.common.training.hooks import Hook
from allstep.pytorch import Session

random = np.random.default_rng(0)
X, Y = random.standard_normal((24, 6)).astype(np.float32), random.integers(0, 3, 24)


class AfterTheFirstEpoch(Hook):
    """Hook that calls a function then, and in no part of a run that is resumed later."""

    def __init__(self, change) -> None:
        self.change = change

    def on_epoch(self, session) -> None:
        if session.progress.position.epoch == 1:
            self.change()


class Counts(torch.optim.SGD):
    """An optimizer with a count of steps in its groups."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.sub_(weight.grad + group["weight_decay"] * weight, alpha=group["lr"] / group["steps"])


class CountsInATensor(Counts):
    """An optimizer that counts steps in place, as timm's Lamb does."""

    @torch.no_grad()
    def step(self, closure=None):
        counts = [group.pop("count", torch.zeros(1)) for group in self.param_groups]
        for group, count in zip(self.param_groups, counts, strict=True):
            group["count"], group["steps"] = count.add_(1), count.item() - 1
        super().step()


class CountsInAList(torch.optim.SGD):
    """An optimizer with a history in its groups."""

    def step(self, closure=None):
        for group in self.param_groups:
            group.setdefault("history", []).append(1)
        super().step()


def test_options_that_a_checkpoint_cannot_hold_are_refused():
    with pytest.raises(UserError, match="received CountsInAList, which changes history of its groups, list; take"):
        train(lambda *_: None, CountsInAList, epochs=1)


def change(network, optimizer) -> None:
    network[0].requires_grad_(False)
    network[2].requires_grad_(True)
    optimizer.param_groups[0].update(weight_decay=0.3, betas=(0.5, 0.8))


def add_group(network, optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


REFUSED = {
    "as many groups .* as at the start, 1": lambda _, one: one.add_param_group(
        {"params": [nn.Parameter(torch.ones(1))]}
    ),
    "the learning rate 0.05, which the run sets, received 5": lambda _, one: one.param_groups[0].update(lr=5.0),
}


def train(change, kind, **flags) -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 3))
    optimizer = kind(network.parameters(), lr=0.05, weight_decay=0)
    hook = AfterTheFirstEpoch(lambda: change(network, optimizer))
    Session(network, (X, Y), (X, Y), optimizer=optimizer, hooks=[hook], global_batch_size=8, **flags).fit()
    return network


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, Counts, CountsInATensor])
def test_a_resumed_run_goes_on_with_them(kind, tmp_path):
    expected = train(change, kind, epochs=3)
    for epochs, resume in ((2, None), (3, "latest")):
        found = train(change, kind, epochs=epochs, resume=resume, output_dir=str(tmp_path))
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other) and one.requires_grad == other.requires_grad


@pytest.mark.parametrize("line", REFUSED)
def test_what_a_step_would_undo_is_refused(line):
    with pytest.raises(UserError, match=line):
        train(REFUSED[line], torch.optim.AdamW, epochs=2)


class EndsTheFirstEpoch(Hook):
    def on_step(self, session) -> None:
        if session.progress.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)  # until this rank is told to stop, after this step


def test_a_run_goes_on_at_the_end_of_an_epoch(tmp_path):
    """Its first moment is then that of the epoch, before any step has set a learning rate."""
    flags = {"optimizer": "sgd", "base_lr": 0.1, "global_batch_size": 8, "output_dir": str(tmp_path), "epochs": 2}
    Session(nn.Linear(6, 3), (X, Y), (X, Y), hooks=[EndsTheFirstEpoch()], **flags).fit()
    history = Session(nn.Linear(6, 3), (X, Y), (X, Y), hooks=[Hook()], resume="latest", **flags).fit()
    assert [epoch["epoch"] for epoch in history] == [1, 2]
