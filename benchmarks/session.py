"""Compare a Session with a minimal hand-written loop, as ratios within one run:

    python -m allstep.benchmarks.session [--frameworks pytorch,tensorflow] [--rounds N] [--output FILE] [--quick]

For each framework, the same network and samples on 2 ranks of one thread each under horovodrun: images per second of a
Session (`timed.py`) and of a Horovod loop (`handwritten/`), in turn; medians over the rounds. The losses of the first
epoch must agree. The exit status is 0 if all targets are reached, 1 otherwise.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from allstep.benchmarks.overhead import BATCH_SIZE, FULL, FULL_OR_QUICK
from allstep.benchmarks.runner import QUICK, benchmark
from allstep.commands.shared.measure import compared, interleaved, job, run_handwritten
from allstep.commands.shared.records.figures import Figure
from allstep.common.process.exit import run_rank


def measure(framework: str, flags: argparse.Namespace, folder: Path) -> tuple[list[Figure], object]:
    """Return the rows of one framework, and the images per second of each round."""
    effort = FULL_OR_QUICK[flags.quick]
    size = ("--num-samples", effort.num_samples, "--batch-size", BATCH_SIZE, "--epochs", effort.num_epochs)
    losses: dict[str, float] = {}

    def rate(side: str, *words: str) -> float:
        result = run_handwritten(
            folder, lambda output: [job(f"allstep.benchmarks.{words[0]}", *words[1:], output, *size)]
        )
        num_in_epoch = len(result.losses) // effort.num_epochs  # a Session reports the mean of an epoch
        losses[side] = statistics.mean(result.losses[:num_in_epoch])
        return statistics.median(result.images_per_second[1:])

    programs = {"session": ("timed", "session", framework), "handwritten": (f"handwritten.{framework}_horovod",)}
    sides = {side: lambda side=side, words=words: rate(side, *words) for side, words in programs.items()}
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


main = benchmark("session", __doc__, measure, rounds=FULL.num_rounds, flags=QUICK)

if __name__ == "__main__":
    run_rank(main)
