"""Ranks that the benchmarks time. Each trains as its first word says, and rank 0 writes a JSON file:

    horovodrun -np 2 python -m allstep.benchmarks.timed check pytorch FILE [flags of train.py]
    horovodrun -np 2 python -m allstep.benchmarks.timed session pytorch FILE \\
        --num-samples 3840 --batch-size 64 --epochs 3

`check` writes the seconds of each replica check: after the broadcast, after step 1 and after each epoch. `session`
trains a user's model by a Session on float32 arrays in memory, and writes what the loops in `handwritten/` write.
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
from allstep.commands.shared.rank import open_session
from allstep.commands.shared.records.files import write_json
from allstep.common.launch.placement import find_placement
from allstep.common.process.exit import run_rank
from allstep.common.recipe.weights import initial_weights


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
    {"check": check, "session": session}[program](*words)


if __name__ == "__main__":
    run_rank(main)
