"""What --recompute saves of memory, and what it costs:

    python -m allstep.benchmarks.recompute [--frameworks pytorch] [--rounds N]

Peak memory of a process that trains a ResNet-18 on 64 images of 160 x 160 pixels, and images a second, with and without
the flag in turn; medians. The losses must be equal. Of the memory, the libraries and the weights take 0.6 GB.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from allstep.commands.shared.measure import Figure, median_ratio, print_table, run, save
from allstep.commands.shared.records.files import output_file
from allstep.commands.shared.records.runs import FILE, read_events
from allstep.common.base.flag_types import MAX_ROUNDS, Parser, listed, one_of, whole
from allstep.common.catalog.strategies import FRAMEWORKS
from allstep.common.process.exit import run_rank

TRAIN = ("--model", "resnet18", "--dataset", "synthetic", "--synthetic-samples", "128", "--synthetic-shape", "160",
         "160", "3", "--batch-size", "64", "--base-lr", "0.001", "--epochs", "1", "--log-every", "1", "--strategy",
         "single", "--device", "cpu")  # fmt: skip
SIDES = {"without": (), "with": ("--recompute",)}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print the table; end with status 1 where memory is not less or a loss differs."""
    parser = Parser("python -m allstep.benchmarks.recompute", __doc__)
    parser.add_argument("--frameworks", type=listed(one_of(*FRAMEWORKS)), default=FRAMEWORKS, metavar="NAME,...")
    parser.add_argument("--rounds", type=whole(1, MAX_ROUNDS), default=3, metavar="N")
    parser.add_argument("--output", type=output_file, default="runs/recompute.json", help="where samples are kept")
    flags = parser.parse_args(argv)
    rows: list[Figure] = []
    samples: dict[str, dict[str, list[tuple[float, ...]]]] = {}
    are_equal = True
    for framework in flags.frameworks:
        taken: dict[str, list[tuple[float, ...]]] = {side: [] for side in SIDES}
        for _ in range(flags.rounds):
            losses = []
            for side, given in SIDES.items():
                figures, losses_by_step = train(framework, given)
                taken[side].append(figures)
                losses.append(losses_by_step)
            are_equal = are_equal and losses[0] == losses[1]
        samples[framework] = taken
        for number, (what, target) in enumerate((("peak memory, MB", "<= 0.9"), ("images/s", ""))):
            ours, reference = ([one[number] for one in taken[side]] for side in ("with", "without"))
            name = f"{framework}, {what} / without"
            medians = statistics.median(ours), statistics.median(reference)
            rows.append(Figure(name, *medians, median_ratio(ours, reference), target))
    print_table(rows)
    save(flags.output, rows, samples)
    if not are_equal or not all(row.reached for row in rows):
        sys.exit(1)


def train(framework: str, given: Sequence[str]) -> tuple[tuple[float, float], list[float]]:
    """Megabytes at the peak, images a second, and the loss of each step."""
    with tempfile.TemporaryDirectory(prefix="allstep-recompute-") as directory:
        module = f"allstep.{framework}.train"
        run([sys.executable, "-m", module, "--output-dir", directory, *TRAIN, *given])
        events = read_events(Path(directory) / FILE)
    memory, rate = events.ends[0].peak_memory_bytes, events.epochs[0].images_per_second
    assert memory is not None and rate is not None  # a trainer reports both
    return (memory / 1e6, rate), [step.loss for step in events.steps]


if __name__ == "__main__":
    run_rank(main)
