"""Trainer whose ranks are killed and suspended, and whose hosts leave and return, for test_elastic.py.

Usage: python elastic.py FRAMEWORK DIRECTORY FLAGS... The discovery script prints DIRECTORY/hosts. Each fault happens
once, in the order of MISHAPS, while there are four ranks; training ends after the next epoch that four ranks complete.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from pathlib import Path

from allstep.common.process.exit import run_rank
from allstep.common.training.hooks import Hook, StopTraining

FRAMEWORK, DIRECTORY = sys.argv[1], Path(sys.argv[2])
BOTH, ONE = "localhost:2\n127.0.0.1:2\n", "localhost:2\n"
STEPS_WITH_FOUR = 12
train = importlib.import_module(f"allstep.{FRAMEWORK}.train")


def signal_itself(rank: int, number: int) -> None:
    if rank == 3:
        os.kill(os.getpid(), number)


def hosts(rank: int, text: str) -> None:
    if rank == 0:
        new = DIRECTORY / "hosts.new"
        new.write_text(text)
        new.rename(DIRECTORY / "hosts")


MISHAPS = {
    "killed": lambda rank: signal_itself(rank, signal.SIGKILL),
    "left": lambda rank: hosts(rank, ONE),
    "frozen": lambda rank: signal_itself(rank, signal.SIGSTOP),
}


class Mishaps(Hook):
    def on_start(self, session) -> None:
        self._steps = 0  # since this job was formed

    def on_step(self, session) -> None:
        time.sleep(0.01)
        self._steps += 1
        rank, size = session.placement.rank, session.placement.world_size
        if size == 2 and self._steps == STEPS_WITH_FOUR:
            hosts(rank, BOTH)
        if size < 4 or self._steps != STEPS_WITH_FOUR or not (left := self._left()):
            return
        session.worker.collectives.barrier()  # all ranks must check before the file exists
        (DIRECTORY / left[0]).touch()
        MISHAPS[left[0]](rank)

    def on_epoch(self, session) -> None:
        if session.placement.world_size == 4 and not self._left():
            raise StopTraining

    def _left(self) -> list[str]:
        return [name for name in MISHAPS if not (DIRECTORY / name).exists()]


run_rank(lambda: train.main(sys.argv[3:], hooks=[Mishaps()]))
