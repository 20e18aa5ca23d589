"""Ranks that the benchmarks time. Each trains as its first word says, and rank 0 writes a JSON file:

    horovodrun -np 2 python -m allstep.benchmarks.timed check pytorch FILE [flags of train.py]
    horovodrun -np 2 python -m allstep.benchmarks.timed steps pytorch FILE SOCKET [flags of train.py]
    horovodrun -np 2 python -m allstep.benchmarks.timed session pytorch FILE \\
        --num-samples 3840 --batch-size 64 --epochs 3

`check` writes the seconds of each replica check: after the broadcast, after step 1 and after each epoch. `steps` writes
the seconds of blocks of steps that are run in turn with another job; `commands/shared/turns.py` gives turns by the
socket. `session` trains a user's model by a Session on float32 arrays in memory, and writes what the loops in
`handwritten/` write.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from allstep.benchmarks.handwritten.data import LEARNING_RATE, MOMENTUM, arguments, in_memory, write
from allstep.commands.shared import turns
from allstep.commands.shared.rank import open_session
from allstep.commands.shared.records.files import write_json
from allstep.common.launch.placement import find_placement
from allstep.common.process.exit import run_rank
from allstep.common.recipe.weights import initial_weights
from allstep.common.training.hooks import Hook, StopTraining
from allstep.common.training.training_run import TrainingRun

NUM_BLOCKS = 40
BLOCK_STEPS = 100
"""Number of steps in a block: the default of --commit-every, so that each has one commit of an elastic job."""


def check(framework: str, output: str, *words: str) -> None:
    """Train and write the seconds of each replica check."""
    seconds: list[float] = []
    if not (session := open_session(framework, words)):
        return
    untimed = session.check_replicas

    def timed(*given: object) -> None:
        started = time.perf_counter()
        untimed(*given)  # pyright: ignore[reportArgumentType]
        seconds.append(time.perf_counter() - started)

    dataclasses.replace(session, check_replicas=timed).train()
    if session.placement.rank == 0:
        write_json(Path(output), seconds)


class TimedBlocks(Hook):
    """Waits for a turn before each block, and writes the seconds of all blocks after the last one."""

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


def steps(framework: str, output: str, socket: str, *words: str) -> None:
    """Train, and write the seconds of each block."""
    train = importlib.import_module(f"allstep.{framework}.train")
    train.main(words, hooks=[TimedBlocks(Path(output), Path(socket))])


def session(framework: str, *words: str) -> None:
    """Train, and write the rate and the mean loss of each epoch."""
    flags = arguments(words)
    program = importlib.import_module(f"allstep.{framework}.session")
    models = importlib.import_module(f"allstep.{framework}.models")
    model = models.build_model("cnn", (28, 28, 1), 10)
    shapes = {name: array.shape for name, array in models.export_weights(model).items()}
    models.import_weights(model, initial_weights(shapes, 0))
    images, labels = in_memory(flags.num_samples, np.arange(flags.num_samples))
    validation = images[: flags.batch_size], labels[: flags.batch_size]
    recipe = {"epochs": flags.epochs, "batch_size": flags.batch_size, "base_lr": LEARNING_RATE, "momentum": MOMENTUM}
    history = program.Session(model, (images, labels), validation, **recipe).fit()
    if find_placement().rank == 0:
        rates = [epoch["images_per_second"] for epoch in history]
        write(flags.output, images_per_second=rates, losses=[epoch["train_loss"] for epoch in history])


def main(argv: Sequence[str] | None = None) -> None:
    program, *words = sys.argv[1:] if argv is None else argv
    {"check": check, "steps": steps, "session": session}[program](*words)


if __name__ == "__main__":
    run_rank(main)
