"""Losses that leave out or weigh some targets are seen before ranks would train something else. Oracle: the formula."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from allstep.common.base.errors import UserError
from allstep.common.data.datasets.base import ArraySplit, Dataset
from allstep.common.training.loss_trial import LossCheck

NUM_SAMPLES = 200
NUMBERS = np.random.default_rng(0).standard_normal((NUM_SAMPLES, 3)).astype(np.float32)
RARE = np.arange(NUM_SAMPLES) % 41 == 7  # and in no sample at equal distances


def of_numbers(weight):
    """Return a mean of squares, of which those count that `weight` says."""

    def loss(outputs, targets):
        weights = np.broadcast_to(weight(targets), targets.shape)
        return (weights * (outputs - targets) ** 2).sum() / max(weights.sum(), 1)

    return loss


def of_classes(weight):
    def loss(outputs, targets):
        logs = outputs - np.log(np.exp(outputs).sum(-1, keepdims=True))
        weights = weight(targets)
        return -(weights * np.take_along_axis(logs, targets[..., None], -1)[..., 0]).sum() / weights.sum()

    return loss


def flooded(loss):
    """Return a loss that goes up again where it is small (Ishida et al. 2020)."""
    return lambda outputs, targets: abs(loss(outputs, targets) - 0.1) + 0.1


ALL = of_numbers(lambda y: 1.0)
LOSSES = {
    "a mean that is small": (NUMBERS, flooded(ALL)),
    "a mean that is large": (NUMBERS, lambda outputs, targets: min(ALL(outputs, targets), 1.0)),
    "a mean over classes that is small": (600, flooded(of_classes(lambda y: y >= 0))),
    "a number that is missing": (np.where(RARE[:, None], -100, NUMBERS), of_numbers(lambda y: y != -100)),
    "a number that is there": (np.where(RARE[:, None], NUMBERS, 0), of_numbers(lambda y: y != 0)),
    "weights in a column": (np.c_[NUMBERS[:, :2], 1 + 4 * RARE], of_numbers(lambda y: y[:, 2:])),
    "a class of a few": (21, of_classes(lambda y: y != 10)),
    "a class of many": (600, of_classes(lambda y: y != 299)),
    "weights of two classes": (2, of_classes(lambda y: 1.0 + y)),
    "a token": ((7, 40), of_classes(lambda y: y != 20)),
    "the last token of very many": ((2, 60_000), of_classes(lambda y: y != 59_999)),
    "no number": (NUMBERS, ALL),
    "no class": (600, of_classes(lambda y: y >= 0)),
    "no token": ((7, 40), of_classes(lambda y: y >= 0)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_loss_leaves_out_is_seen(name):
    targets, loss = LOSSES[name]
    if isinstance(targets, np.ndarray):
        split = ArraySplit(NUMBERS, targets.astype(np.float32))
        dataset = Dataset(split, split, (3,), 3, task="regression")
    else:
        length, classes = targets if isinstance(targets, tuple) else (3, targets)
        task = "next-token" if isinstance(targets, tuple) else "classification"
        split = ArraySplit(NUMBERS, np.zeros(NUM_SAMPLES, np.int64))
        dataset = Dataset(split, split, (length,), classes, task=task)
    config = SimpleNamespace(loss="mine", parallel=SimpleNamespace(num_slices=None, accumulate_steps=1))
    placement, strategy = SimpleNamespace(world_size=2, rank=0), SimpleNamespace(num_local_devices=1)
    run: Any = SimpleNamespace(config=config, placement=placement, strategy=strategy, dataset=dataset)
    adds_up = contextlib.nullcontext() if name.startswith("no ") else pytest.raises(UserError, match="for their parts")
    with adds_up:
        LossCheck(lambda outputs, targets: float(loss(outputs, targets)) * len(targets)).check(run)
