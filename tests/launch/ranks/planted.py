"""Trainer with a planted fault on one rank and without replica checks, for `test_bisect.py`.

    python tests/launch/ranks/planted.py FRAMEWORK FAULT RANK STEP [FLAGS of the trainer]

FAULT is `rate` (another learning rate in that step), `order` (its samples are permuted) or `broadcast` (before that
step, which must be 1, the first weight differs from that of rank 0).
"""

from __future__ import annotations

import dataclasses
import sys

import numpy as np

from allstep.commands.shared.rank import open_session
from allstep.commands.soak.fault_injection import Wrapped
from allstep.common.process.exit import run_rank


class Planted(Wrapped):
    """Worker with the fault."""

    def __init__(self, worker, fault, step) -> None:
        super().__init__(worker)
        self.fault, self.step, self.num_steps = fault, step, 0

    def train_step(self, batch, learning_rate, loss_scale=1.0):
        self.num_steps += 1
        if self.num_steps == self.step:
            if self.fault == "rate":
                learning_rate *= 1.01
            elif self.fault == "order":
                batch = dataclasses.replace(
                    batch, inputs=np.roll(batch.inputs, 1, axis=0), targets=np.roll(batch.targets, 1, axis=0)
                )
            else:
                self.change_first_weight()
        return self.original.train_step(batch, learning_rate, loss_scale)

    def change_first_weight(self) -> None:
        if self.framework == "pytorch":
            _, array = next(self.parameters())  # shares memory with the weight
            array += 1
        else:
            variable = self._model.trainable_variables[0]
            variable.assign(variable + 1)


def main() -> None:
    framework, fault, rank, step, *flags = sys.argv[1:]
    session = open_session(framework, flags)
    if session is None:
        return
    if session.placement.rank == int(rank):
        session = dataclasses.replace(session, worker=Planted(session.worker, fault, int(step)))
    dataclasses.replace(session, check_replicas=lambda *_: None).train()


run_rank(main)
