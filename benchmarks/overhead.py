"""What the trainers cost beside the least that one could write by hand, as ratios within one run:

    python -m allstep.benchmarks.overhead [--frameworks pytorch,tensorflow] [--output FILE] [--quick]

For each framework, on 2 ranks of one thread each (the network: cnn, 28x28x1, 64 images a rank and step):

    largest difference of losses    that the trainer and a hand-written Horovod loop train the same thing
    images/s / hand-written         both with their data in memory
    images/s / independent          beside two single processes at the same time, which is the limit
    seconds to first step           more than a bare horovodrun of the same imports (a difference)
    replica check / 100 steps       seconds, in the same run

Throughputs and start-ups are medians over interleaved rounds. The exit status is 0 where all targets are reached,
1 where one is missed.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from allstep.benchmarks.handwritten.data import trainer_flags
from allstep.commands.shared.measure import (
    interleaved,
    job,
    largest_relative_difference,
    median_difference,
    median_ratio,
    new_output,
    print_table,
    printed_rates,
    run,
    run_handwritten,
    save,
    seconds_until,
)
from allstep.commands.shared.records import files
from allstep.commands.shared.records.figures import Figure, Handwritten
from allstep.commands.shared.records.runs import FILE, read_events
from allstep.common.base.flag_types import Parser, listed, one_of
from allstep.common.catalog.strategies import FRAMEWORKS
from allstep.common.process.exit import run_rank

BATCH_SIZE = 64
NUM_RANKS = 2


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    num_rounds: int
    """Interleaved rounds."""
    steps_per_epoch: int
    num_epochs: int
    """Of a run, the first included, which warms up and does not count."""

    @property
    def num_samples(self) -> int:
        """Training samples, so that an epoch has `steps_per_epoch`."""
        return self.steps_per_epoch * BATCH_SIZE * NUM_RANKS


FULL = Effort(num_rounds=5, steps_per_epoch=25, num_epochs=5)
QUICK = Effort(num_rounds=1, steps_per_epoch=2, num_epochs=2)


class TrainerBench:
    """The measurements of one framework; each launches real jobs, in a folder of its own."""

    def __init__(self, framework: str, effort: Effort, directory: Path) -> None:
        self.framework, self.effort, self._directory = framework, effort, directory

    def throughput(self) -> float:
        """Images per second of the trainer, the median of its epochs."""
        [printed] = run(job(f"allstep.{self.framework}.train", *self._flags()))
        return statistics.median(printed_rates(printed))

    def handwritten_throughput(self) -> float:
        """Images per second of the hand-written loop, the median of its epochs."""
        return statistics.median(self._handwritten(self.effort.num_epochs).images_per_second[1:])

    def independent_throughput(self) -> float:
        """Images per second of two single processes at the same time, together."""
        alone = job(f"allstep.{self.framework}.train", *self._flags(), num_ranks=None)
        return sum(statistics.median(printed_rates(printed)) for printed in run(*[alone] * NUM_RANKS))

    def loss_difference(self) -> Figure:
        """Whether the trainer and the hand-written loop train the same thing."""
        output = new_output(self._directory)
        run(job(f"allstep.{self.framework}.train", *self._flags(epochs=1), "--output-dir", output, "--log-every", 1))
        ours = [event.loss for event in read_events(output / FILE).steps]
        reference = self._handwritten(1).losses
        return Figure(
            f"{self.framework}: largest difference of losses",
            ours[-1],
            reference[-1],
            largest_relative_difference(ours, reference),
            "<= 1e-4",
        )

    def startup(self) -> float:
        """Seconds from the launch of the trainer to the end of its first step."""
        output = new_output(self._directory)
        metrics = output / FILE
        command = job(
            f"allstep.{self.framework}.train",
            *self._flags(epochs=1, num_samples=NUM_RANKS, batch_size=1),
            *("--output-dir", output, "--log-every", 1),
        )
        return seconds_until(command, lambda: metrics.exists() and '"step"' in metrics.read_text())

    def bare_startup(self) -> float:
        """Seconds from a bare launch to its first all-reduce."""
        done = new_output(self._directory)
        return seconds_until(job("allstep.benchmarks.handwritten.bare", self.framework, done), done.exists)

    def check_cost(self) -> Figure:
        """The replica check after an epoch, beside 100 steps of the same run."""
        checks = new_output(self._directory)
        [printed] = run(job("allstep.benchmarks.timed_check", self.framework, checks, *self._flags()))
        step_seconds = statistics.median(BATCH_SIZE * NUM_RANKS / rate for rate in printed_rates(printed))
        after_epochs = files.read_json(tuple[float, ...], checks)[2:]
        check_seconds = statistics.median(after_epochs[1:])
        return Figure(
            f"{self.framework}: replica check / 100 steps",
            check_seconds,
            100 * step_seconds,
            check_seconds / (100 * step_seconds),
            "<= 0.01",
        )

    def _handwritten(self, num_epochs: int) -> Handwritten:
        module = f"allstep.benchmarks.handwritten.{self.framework}_horovod"
        flags = ("--epochs", num_epochs, "--num-samples", self.effort.num_samples, "--batch-size", BATCH_SIZE)
        return run_handwritten(self._directory, lambda output: [job(module, output, *flags)])

    def _flags(
        self, *, epochs: int | None = None, num_samples: int | None = None, batch_size: int = BATCH_SIZE
    ) -> Sequence[object]:
        flags = trainer_flags(num_samples or self.effort.num_samples, epochs or self.effort.num_epochs)
        return *flags, "--batch-size", batch_size


def figures(bench: TrainerBench) -> tuple[list[Figure], dict[str, dict[str, list[float]]]]:
    """The rows of one framework, and the samples of its rounds."""
    same = bench.loss_difference()
    rates = interleaved(
        {
            "ours": bench.throughput,
            "handwritten": bench.handwritten_throughput,
            "independent": bench.independent_throughput,
        },
        bench.effort.num_rounds,
    )
    startups = interleaved({"ours": bench.startup, "bare": bench.bare_startup}, bench.effort.num_rounds)
    middle = {name: statistics.median(samples) for name, samples in rates.items()}
    rows = [
        same,
        Figure(
            f"{bench.framework}: images/s / hand-written",
            middle["ours"],
            middle["handwritten"],
            median_ratio(rates["ours"], rates["handwritten"]),
            ">= 0.98",
        ),
        Figure(
            f"{bench.framework}: images/s / independent",
            middle["ours"],
            middle["independent"],
            median_ratio(rates["ours"], rates["independent"]),
            ">= 0.93",
        ),
        Figure(
            f"{bench.framework}: seconds to first step, more than bare",
            statistics.median(startups["ours"]),
            statistics.median(startups["bare"]),
            median_difference(startups["ours"], startups["bare"]),
            "<= 1.0",
        ),
        bench.check_cost(),
    ]
    return rows, {"images_per_second": rates, "startup_seconds": startups}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print the table; end with status 1 where a target is missed."""
    parser = Parser("python -m allstep.benchmarks.overhead", __doc__)
    parser.add_argument("--frameworks", type=listed(one_of(*FRAMEWORKS)), default=FRAMEWORKS, metavar="NAME,...")
    parser.add_argument("--output", type=files.output_file, default="runs/overhead.json", help="for raw samples")
    parser.add_argument("--quick", action="store_true", help="a trial of a few steps, whose figures say nothing")
    flags = parser.parse_args(argv)
    effort = QUICK if flags.quick else FULL
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"this machine is busy (load {load:.1f}): figures suffer where it has other work", file=sys.stderr)
    rows: list[Figure] = []
    samples = {}
    with tempfile.TemporaryDirectory(prefix="allstep-overhead-") as directory:
        for framework in flags.frameworks:
            found, samples[framework] = figures(TrainerBench(framework, effort, Path(directory)))
            rows += found
    print_table(rows)
    save(flags.output, rows, samples)
    if not all(row.reached for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    run_rank(main)
