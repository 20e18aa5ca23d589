"""Train as `train.py` does, in blocks of steps that are run in turn with another job, and time each block.

    horovodrun -np 2 python -m allstep.benchmarks.timed_steps pytorch seconds.json SOCKET [flags of train.py]

`SOCKET` is where `commands/shared/turns.py` gives the turns. The steps of a block are those between two commits
of an elastic job, with one of the commits.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from allstep.commands.shared import turns
from allstep.commands.shared.records.files import write_json
from allstep.common.process.exit import run_rank
from allstep.common.training.hooks import Hook, StopTraining
from allstep.common.training.training_run import TrainingRun

NUM_BLOCKS = 40
BLOCK_STEPS = 100
"""The default of --commit-every."""


class TimedBlocks(Hook):
    """Waits for a turn in front of each block, and writes the seconds of all blocks behind the last one."""

    def __init__(self, output: Path, socket: Path) -> None:
        self._output, self._socket = output, socket
        self._seconds: list[float] = []

    def on_start(self, session: TrainingRun) -> None:
        self._wait_for_turn = turns.join(self._socket, session.placement.world_size)

    def on_step(self, session: TrainingRun) -> None:
        if session.progress.step % BLOCK_STEPS:
            return
        if session.progress.step > BLOCK_STEPS:  # the first ones warm up
            self._seconds.append(time.perf_counter() - self._started)
        self._wait_for_turn()
        if len(self._seconds) == NUM_BLOCKS:
            raise StopTraining
        self._started = time.perf_counter()

    def on_end(self, session: TrainingRun) -> None:
        if session.placement.rank == 0:
            write_json(self._output, self._seconds)


def main(argv: Sequence[str] | None = None) -> None:
    """Train and write the seconds."""
    framework, output, socket, *arguments = sys.argv[1:] if argv is None else argv
    train = importlib.import_module(f"allstep.{framework}.train")
    train.main(arguments, hooks=[TimedBlocks(Path(output), Path(socket))])


if __name__ == "__main__":
    run_rank(main)
