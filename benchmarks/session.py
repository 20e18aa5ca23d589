"""Compare a Session with a minimal hand-written loop, as ratios within one run:

    python -m allstep.benchmarks.session [--frameworks pytorch,tensorflow] [--rounds N] [--output FILE] [--quick]

For each framework, the same network and samples on 2 ranks of one thread each under horovodrun: images per second of a
Session and of a Horovod loop (`handwritten/`), in turn; medians over the rounds. The losses of the first
epoch must agree. The exit status is 0 if all targets are reached, 1 otherwise.
"""

import argparse
import importlib
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np

from allstep.benchmarks.handwritten.data import LEARNING_RATE, MOMENTUM, arguments, in_memory, write
from allstep.benchmarks.overhead import BATCH_SIZE, FULL, FULL_OR_QUICK
from allstep.benchmarks.runner import QUICK, benchmark, program
from allstep.commands.shared.measure import compared, interleaved, job, run_handwritten
from allstep.commands.shared.records.measured import Figure
from allstep.common.launch.placement import find_placement
from allstep.common.process.exit import run_rank
from allstep.common.recipe.weights import initial_weights


def train(framework: str, *words: str) -> None:
    """Train by a Session on float32 arrays in memory, and write what the loops in `handwritten/` write."""
    flags = arguments(words)
    sessions = importlib.import_module(f"allstep.{framework}.session")
    models = importlib.import_module(f"allstep.{framework}.models")
    model = models.build_model("cnn", (28, 28, 1), 10)
    shapes = {name: array.shape for name, array in models.export_weights(model).items()}
    models.import_weights(model, initial_weights(shapes, 0))
    images, labels = in_memory(flags.num_samples, np.arange(flags.num_samples))
    validation = images[: flags.batch_size], labels[: flags.batch_size]
    recipe = {"epochs": flags.epochs, "batch_size": flags.batch_size, "base_lr": LEARNING_RATE, "momentum": MOMENTUM}
    history = sessions.Session(model, (images, labels), validation, **recipe).fit()
    if find_placement().rank == 0:
        rates = [epoch["images_per_second"] for epoch in history]
        write(flags.output, images_per_second=rates, losses=[epoch["train_loss"] for epoch in history])


def measure(framework: str, flags: argparse.Namespace, folder: Path) -> tuple[list[Figure], object]:
    """Return the rows of one framework, and the images per second of each round."""
    effort = FULL_OR_QUICK[flags.quick]
    size = ("--num-samples", effort.num_samples, "--batch-size", BATCH_SIZE, "--epochs", effort.num_epochs)
    losses: dict[str, float] = {}

    def rate(side: str, command: Callable[[Path], list[str]]) -> float:
        result = run_handwritten(folder, command)
        num_in_epoch = len(result.losses) // effort.num_epochs  # a Session reports the mean of an epoch
        losses[side] = statistics.mean(result.losses[:num_in_epoch])
        return statistics.median(result.images_per_second[1:])

    by_hand = f"allstep.benchmarks.handwritten.{framework}_horovod"
    ours = ("session", "train", framework)
    sides = {
        "session": lambda: rate("session", lambda output: program(*ours, output, *size, num_ranks=2)),
        "handwritten": lambda: rate("handwritten", lambda output: job(by_hand, output, *size)),
    }
    rates = interleaved(sides, flags.rounds)
    apart = abs(losses["session"] / losses["handwritten"] - 1)
    return [
        Figure(
            f"{framework}: difference of the first epoch's loss",
            losses["session"],
            losses["handwritten"],
            apart,
            "<= 1e-4",
        ),
        compared(f"{framework}: images/s by a Session / hand-written", *rates.values(), target=">= 0.98"),
    ], rates


main = benchmark("session", __doc__, measure, rounds=FULL.num_rounds, flags=QUICK, programs=(train,))

if __name__ == "__main__":
    run_rank(main)
