"""A trainer of which one rank goes wrong at a given step, for `allstep soak` and the tests of faults.

    python -m allstep.benchmarks.faulty FRAMEWORK FAULT RANK STEP [FLAGS of the trainer]

FAULT is `raises`, `raises-writing` (while a slow disk still writes a checkpoint), `stuck` (in the input pipeline),
`hangs` (at the end of a step), `leaves-out` (a step, and with it a collective) or `lingers` (after the last epoch,
whatever STEP is).
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

from allstep.common import engine
from allstep.common.checkpoint import files
from allstep.common.ending import run_rank
from allstep.common.launcher import placement
from allstep.common.loader import Batch
from allstep.common.quiet import lean_import


def main() -> None:
    framework, fault, rank, step, *flags = sys.argv[1:]
    sys.argv[1:] = flags
    trainer = importlib.import_module(f"allstep.{framework}.train")
    if placement().rank == int(rank):
        FAULTS[fault](framework, int(step))
    trainer.main()


def raise_at(framework: str, step: int) -> None:
    """Raise in the training step of that number."""

    def fail(*_: object) -> None:
        raise OSError("lost the disk")

    _replace_step(framework, step, fail)


def raise_while_writing(framework: str, step: int) -> None:
    """Raise in the training step of that number, while the checkpoint before it is being written for seconds."""
    write = files.write

    def write_slowly(*args: object) -> None:
        time.sleep(8)
        write(*args)

    files.write = write_slowly
    raise_at(framework, step)


def leave_out(framework: str, step: int) -> None:
    """Do nothing in the training step of that number."""
    _replace_step(framework, step, lambda *_: np.float32(0))


def hang_after(framework: str, step: int) -> None:
    """Never return from the training step of that number; the other ranks have all that they need of it."""

    def hang(train_step: Callable, *args: object) -> None:
        float(train_step(*args))
        time.sleep(1e6)

    _replace_step(framework, step, hang)


def get_stuck_at(framework: str, step: int) -> None:
    """Never get the batch of that number."""
    original, numbers = engine.train_batches, itertools.count(1)

    def batches(*args: object, **kwargs: object) -> Iterator[Batch]:
        for batch in original(*args, **kwargs):
            if next(numbers) == step:
                time.sleep(1e6)
            yield batch

    engine.train_batches = batches


def linger(framework: str, step: int) -> None:
    """Train to the end, and never leave."""
    fit = engine.fit

    def fit_and_stay(*args: object) -> None:
        fit(*args)
        time.sleep(1e6)

    engine.fit = fit_and_stay


FAULTS = {
    "raises": raise_at,
    "raises-writing": raise_while_writing,
    "stuck": get_stuck_at,
    "hangs": hang_after,
    "leaves-out": leave_out,
    "lingers": linger,
}


def _replace_step(framework: str, step: int, instead: Callable) -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with lean_import():
        worker = importlib.import_module(f"allstep.{framework}.worker").Worker
    original, numbers = worker.train_step, itertools.count(1)
    worker.train_step = lambda *args: instead(original, *args) if next(numbers) == step else original(*args)


if __name__ == "__main__":
    run_rank(main)
