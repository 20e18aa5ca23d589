"""Runs that end in an error, on ranks in threads. Oracle: the messages that users are promised."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from numpy_ranks import Job, changed_worker, on_rank
from numpy_worker import NumpyWorker

from allstep.common.base.errors import Fault, UserError
from allstep.common.training.hooks import Hook
from allstep.common.training.worker import StepResult


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_diverging_loss_names_step_and_learning_rate(num_ranks):
    def diverge(self, batch, *rest):
        result = NumpyWorker.train_step(self, batch, *rest)
        bad = self.num_steps == 3 and self.collectives.rank == num_ranks - 1
        return dataclasses.replace(result, loss_sum=math.nan if bad else result.loss_sum)

    with pytest.raises(UserError, match="finite loss, received nan at step 3 with learning rate 0.05; lower"):
        Job(num_ranks, prepare=changed_worker(train_step=diverge)).train()


def test_a_validation_loss_that_is_not_finite_names_the_epoch():
    with pytest.raises(UserError, match="finite validation loss, received inf after epoch 1; lower --base-lr"):
        Job(
            2, prepare=changed_worker(eval_step=lambda self, batch: (math.inf, np.zeros((len(batch.targets), 10))))
        ).train()


@pytest.mark.parametrize(
    ("moment", "step"), [("after the broadcast", 0), ("after step 1", 1), ("after epoch 1", 4), ("after epoch 2", 8)]
)
def test_replicas_that_differ_end_the_run(moment, step):
    """Rank 1 has one bit changed before that moment."""

    class Flips(Hook):
        def on_start(self, run):
            self.flip(run)

        def on_step(self, run):
            self.flip(run)

        def flip(self, run):
            if run.placement.rank == 1 and run.progress.step == step:
                run.worker.weights["fc.bias"].view(np.int32)[3] ^= 1

    words = f"out of step {moment}: the weights of rank 1 differ from those of rank 0, first in fc.bias"
    with pytest.raises(Fault, match=words):
        Job(2, "--epochs", 2, hooks=lambda job, rank: [Flips()]).train()


def test_a_failure_names_its_step_and_its_cause():
    def fail(self, batch, *rest):
        if self.num_steps == 6:
            raise OSError("lost the disk")
        return NumpyWorker.train_step(self, batch, *rest)

    with pytest.raises(Fault, match="^step 7 failed: OSError: lost the disk") as error:
        Job(2, prepare=on_rank(1, changed_worker(train_step=fail))).train()
    assert isinstance(error.value.__cause__, OSError)


def test_a_failure_of_a_hook_after_an_epoch_is_its_own(tmp_path):
    class Fails(Hook):
        def on_epoch(self, run):
            raise KeyError("mine")

    with pytest.raises(Fault, match="^a hook after step 4 failed: KeyError: 'mine'"):
        Job(2, "--output-dir", tmp_path, hooks=lambda job, rank: [Fails()]).train()


@pytest.mark.parametrize("flag", ["--deterministic", ""])
def test_an_operation_without_a_deterministic_form_is_a_mistake_only_with_the_flag(flag):
    def fail(self, *_):
        raise RuntimeError("put_ does not have a deterministic implementation")

    expected = (UserError, "received one in step 1 that has none: .*; leave out") if flag else (Fault, "step 1 failed")
    with pytest.raises(expected[0], match=expected[1]):
        Job(1, *[flag] * bool(flag), prepare=changed_worker(train_step=fail)).train()


def test_gradients_that_overflow_at_any_scale_are_a_mistake():
    def overflow(self, batch, learning_rate, loss_scale):
        return StepResult(1.0, overflow=1)

    with pytest.raises(UserError, match="expected gradients that are finite in half precision"):
        Job(1, "--precision", "fp16", "--epochs", 20, prepare=changed_worker(train_step=overflow)).train()


@pytest.mark.parametrize(
    ("num_ranks", "flags", "expected"),
    [
        (2, ("--synthetic-samples", 1, "--global-batch-size", 1), "at least one training sample per rank.*1 samples"),
        (1, ("--global-batch-size", 227), "at most all 226"),
        (1, ("--drop-last", "--batch-ramp", "5:4"), "at most all 226"),
        (1, ("--batch-ramp", "auto"), "expected two ranks, devices or passes at least with --batch-ramp auto"),
    ],
    ids=str,
)
def test_mistakes_in_the_schedule(num_ranks, flags, expected):
    with pytest.raises(UserError, match=expected):
        Job(num_ranks, *flags).train()
