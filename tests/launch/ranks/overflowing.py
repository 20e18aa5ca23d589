"""Trainer with --precision fp16 in which the gradients of one rank overflow in step 3, for `test_fp16.py`.

    python tests/launch/ranks/overflowing.py FRAMEWORK RANK [FLAGS of the trainer]

It asserts that weights and optimizer slots do not change in that step, and change in all other steps.
"""

from __future__ import annotations

import dataclasses
import math
import sys

import numpy as np

from allstep.commands.shared.rank import open_session
from allstep.commands.soak.fault_injection import Wrapped
from allstep.common.process.exit import run_rank
from allstep.common.recipe.loss_scale import LossScale
from allstep.common.training.hooks import Hook

PLANTED = 3


class Overflowing(Wrapped):
    """Worker whose loss is scaled by infinity in one step on one rank."""

    overflows = False
    results: list = []

    def train_step(self, batch, learning_rate, loss_scale):
        number = len(self.results) + 1
        planted = number == PLANTED and self.overflows
        for result in self.results:
            float(result)  # so that no asynchronous step is in flight
        before = self.state()
        if planted and "model-parallel" in sys.argv:  # gradients carry the scale from stage to stage
            from allstep.pytorch.state import local_parameters

            _, parameter = list(local_parameters(self._network))[-1]
            handle = parameter.register_hook(lambda gradient: gradient * math.inf)
            result = self.original.train_step(batch, learning_rate, loss_scale)
            handle.remove()
        else:
            result = self.original.train_step(batch, learning_rate, math.inf if planted else loss_scale)
        float(result)
        self.results.append(result)
        after = self.state()
        equal = all((before[name] == after[name]).all() for name in before)
        assert equal == (number == PLANTED) or not before, f"step {number}: {equal}"
        assert all(np.isfinite(array).all() for array in after.values())
        return result

    def state(self):
        # Copy the arrays, because the next step may overwrite their memory.
        return {name: np.array(array) for name, array in self.export_state().items()}


class Scaled(Hook):
    """Starts with a scale at which no gradient overflows by itself."""

    def on_start(self, session):
        session.progress.loss_scale = LossScale(1024.0)

    def on_end(self, session):
        print(f"all right on rank {session.placement.rank}")


def main() -> None:
    framework, rank, *flags = sys.argv[1:]
    session = open_session(framework, [*flags, "--precision", "fp16"])
    if session is None:
        return
    worker = Overflowing(session.worker)
    worker.overflows = session.placement.rank == int(rank)
    dataclasses.replace(session, worker=worker, hooks=[Scaled()]).train()


run_rank(main)
