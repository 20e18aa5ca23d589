"""What a Session costs beside the least that one could write by hand, as ratios within one run:

    python -m allstep.benchmarks.session [--frameworks pytorch,tensorflow] [--rounds N] [--output FILE] [--quick]

For each framework, the same network and samples on 2 ranks of one thread each under horovodrun: images a second by a
Session (`timed_session.py`) and by a loop of Horovod's (`handwritten/`), in turn; medians over the rounds. The losses
of the first epoch must agree. The exit status is 0 where all targets are reached, 1 where one is missed.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from allstep.benchmarks.overhead import BATCH_SIZE, FULL, QUICK, Effort
from allstep.commands.shared.measure import job, median_ratio, print_table, run_handwritten, save
from allstep.commands.shared.records.figures import Figure, Handwritten
from allstep.commands.shared.records.files import output_file
from allstep.common.base.flag_types import MAX_ROUNDS, Parser, listed, one_of, whole
from allstep.common.catalog.strategies import FRAMEWORKS
from allstep.common.process.exit import run_rank


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print the table; end with status 1 where a target is missed."""
    parser = Parser("python -m allstep.benchmarks.session", __doc__)
    parser.add_argument("--frameworks", type=listed(one_of(*FRAMEWORKS)), default=FRAMEWORKS, metavar="NAME,...")
    parser.add_argument("--rounds", type=whole(1, MAX_ROUNDS), default=5, metavar="N", help="of both in turn (5)")
    parser.add_argument("--output", type=output_file, default="runs/session.json", help="where samples are kept")
    parser.add_argument("--quick", action="store_true", help="a trial of a few steps, whose rates say nothing")
    flags = parser.parse_args(argv)
    effort = QUICK if flags.quick else FULL
    rows: list[Figure] = []
    samples = {}
    with tempfile.TemporaryDirectory(prefix="allstep-session-") as directory:
        for framework in flags.frameworks:
            found, samples[framework] = figures(framework, effort, flags.rounds, Path(directory))
            rows += found
    print_table(rows)
    save(flags.output, rows, samples)
    if not all(row.reached for row in rows):
        sys.exit(1)


def figures(
    framework: str, effort: Effort, num_rounds: int, directory: Path
) -> tuple[list[Figure], dict[str, list[float]]]:
    """The rows of one framework, and the images a second of each round."""
    modules = {"session": ("timed_session", framework), "handwritten": (f"handwritten.{framework}_horovod",)}
    rates: dict[str, list[float]] = {side: [] for side in modules}
    losses: dict[str, float] = {}
    for number in range(num_rounds):
        for side, words in modules.items():
            result = _train(words, effort, directory)
            rates[side].append(statistics.median(result.images_per_second[1:]))
            num_in_epoch = len(result.losses) // effort.num_epochs  # a Session says the mean of an epoch
            losses[side] = statistics.mean(result.losses[:num_in_epoch])
            print(f"round {number + 1} of {num_rounds}: {side} {rates[side][-1]:.5g}", file=sys.stderr, flush=True)
    ours, reference = rates["session"], rates["handwritten"]
    return [
        Figure(
            f"{framework}: difference of the first epoch's loss",
            losses["session"],
            losses["handwritten"],
            abs(losses["session"] / losses["handwritten"] - 1),
            "<= 1e-4",
        ),
        Figure(
            f"{framework}: images/s by a Session / hand-written",
            statistics.median(ours),
            statistics.median(reference),
            median_ratio(ours, reference),
            ">= 0.98",
        ),
    ], rates


def _train(words: Sequence[str], effort: Effort, directory: Path) -> Handwritten:
    module, *framework = words
    size = ("--num-samples", effort.num_samples, "--batch-size", BATCH_SIZE, "--epochs", effort.num_epochs)
    return run_handwritten(directory, lambda output: [job(f"allstep.benchmarks.{module}", *framework, output, *size)])


if __name__ == "__main__":
    run_rank(main)
