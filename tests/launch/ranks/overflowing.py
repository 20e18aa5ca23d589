"""A run with --precision fp16 in which the gradients of one rank overflow in step 3, for `test_fp16.py`.

    python tests/launch/ranks/overflowing.py FRAMEWORK RANK [FLAGS of the trainer]

Checks on rank 0 that the step has left weights and optimizer slots as they were, and changes them when it is the next.
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
    """A worker whose loss is scaled beyond all bounds in one step on one rank."""

    overflows = False
    results: list = []

    def train_step(self, batch, learning_rate, loss_scale):
        number = len(self.results) + 1
        planted = number == PLANTED and self.overflows
        for result in self.results:
            float(result)  # so that nothing is under way where steps are asynchronous
        before = self.state()
        if planted and "model-parallel" in sys.argv:  # the stages hand the loss's scale on in their gradients
            _, parameter = list(self._local_parameters())[-1]
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
        # Copies: some of it is the memory in which the next step computes.
        return {name: np.array(array) for name, array in self.export_state().items()}


class Scaled(Hook):
    """Begins with a scale at which nothing overflows by itself."""

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
