"""A trainer of which one rank goes wrong at a given step, for `allstep soak` and the tests of faults.

    python -m allstep.benchmarks.faulty FRAMEWORK FAULT RANK STEP [FLAGS of the trainer]

FAULT is `raises`, `stuck` (in the input pipeline) or `leaves-out` (a step, and with it a collective).
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
from allstep.common.ending import run_rank
from allstep.common.launcher import placement
from allstep.common.loader import Batch
from allstep.common.quiet import hidden, stderr_held_back

FAULTS = ("raises", "stuck", "leaves-out")


def main() -> None:
    framework, fault, rank, step, *flags = sys.argv[1:]
    sys.argv[1:] = flags
    trainer = importlib.import_module(f"allstep.{framework}.train")
    if placement().rank == int(rank):
        {"raises": raise_at, "stuck": get_stuck_at, "leaves-out": leave_out}[fault](framework, int(step))
    trainer.main()


def raise_at(framework: str, step: int) -> None:
    """Raise in the training step of that number."""

    def fail(*_: object) -> None:
        raise OSError("lost the disk")

    _replace_step(framework, step, fail)


def leave_out(framework: str, step: int) -> None:
    """Do nothing in the training step of that number."""
    _replace_step(framework, step, lambda *_: np.float32(0))


def get_stuck_at(framework: str, step: int) -> None:
    """Never get the batch of that number."""
    original, numbers = engine.train_batches, itertools.count(1)

    def batches(*args: object, **kwargs: object) -> Iterator[Batch]:
        for batch in original(*args, **kwargs):
            if next(numbers) == step:
                time.sleep(1e6)
            yield batch

    engine.train_batches = batches


def _replace_step(framework: str, step: int, instead: Callable) -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with stderr_held_back(), hidden("sklearn"):
        worker = importlib.import_module(f"allstep.{framework}.worker").Worker
    original, numbers = worker.train_step, itertools.count(1)
    worker.train_step = lambda *args: (instead if next(numbers) == step else original)(*args)


if __name__ == "__main__":
    run_rank(main)
