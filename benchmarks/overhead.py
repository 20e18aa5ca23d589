"""Compare the trainers with minimal hand-written loops, as ratios within one run:

    python -m allstep.benchmarks.overhead [--frameworks pytorch,tensorflow] [--output FILE] [--quick]

For each framework, on 2 ranks of one thread each (the network: cnn, 28x28x1, 64 images per rank and step):

    largest difference of losses    shows that the trainer and a hand-written Horovod loop train the same network
    difference of the mean loss     shows the same of a Session, which reports the mean of an epoch
    images/s / hand-written         against that loop, both with their data in memory
    images/s by a Session           against that loop
    images/s / independent          against two independent processes at the same time, which is the limit
    seconds to first step           in excess of a bare horovodrun with the same imports (a difference)
    replica check / 100 steps       seconds, in the same run

Throughputs and start-ups are medians over interleaved rounds. The exit status is 0 if all targets are reached,
1 otherwise.
"""

import argparse
import dataclasses
import importlib
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from allstep.benchmarks.figures import (
    Handwritten,
    compared,
    largest_relative_difference,
    median_difference,
    new_output,
    printed_rates,
    run_handwritten,
    seconds_until,
)
from allstep.benchmarks.handwritten.data import LEARNING_RATE, MOMENTUM, arguments, in_memory, trainer_flags, write
from allstep.benchmarks.runner import QUICK, benchmark, program
from allstep.commands.shared.measure import interleaved, job, run
from allstep.commands.shared.rank import open_session
from allstep.commands.shared.records import files
from allstep.commands.shared.records.measured import Figure
from allstep.commands.shared.records.runs import FILE, read_events
from allstep.common.launch.placement import find_placement
from allstep.common.process.exit import run_rank
from allstep.common.recipe.weights import initial_weights

BATCH_SIZE = 64
NUM_RANKS = 2


@dataclass(frozen=True)
class Effort:
    """Sizes of the measurements."""

    num_rounds: int
    """Number of interleaved rounds."""
    steps_per_epoch: int
    num_epochs: int
    """Number of epochs of a run, including the first, which warms up and does not count."""

    @property
    def num_samples(self) -> int:
        """Number of training samples, such that an epoch has `steps_per_epoch`."""
        return self.steps_per_epoch * BATCH_SIZE * NUM_RANKS


FULL = Effort(num_rounds=5, steps_per_epoch=25, num_epochs=5)
FULL_OR_QUICK = {False: FULL, True: Effort(num_rounds=1, steps_per_epoch=2, num_epochs=2)}


class TrainerBench:
    """Measurements of one framework; each launches real jobs, in a separate folder."""

    def __init__(self, framework: str, effort: Effort, directory: Path) -> None:
        self.framework, self.effort, self._directory = framework, effort, directory

    def throughput(self) -> float:
        """Return the images per second of the trainer, the median of its epochs."""
        [printed] = run(job(f"allstep.{self.framework}.train", *self._flags()))
        return statistics.median(printed_rates(printed))

    def handwritten_throughput(self) -> float:
        """Return the images per second of the hand-written loop, the median of its epochs."""
        return statistics.median(self._handwritten(self.effort.num_epochs).images_per_second[1:])

    def session_throughput(self) -> float:
        """Return the images per second of a Session, the median of its epochs."""
        return statistics.median(self._session(self.effort.num_epochs).images_per_second[1:])

    def independent_throughput(self) -> float:
        """Return the total images per second of two independent processes that run at the same time."""
        alone = job(f"allstep.{self.framework}.train", *self._flags(), num_ranks=None)
        return sum(statistics.median(printed_rates(printed)) for printed in run(*[alone] * NUM_RANKS))

    def loss_differences(self) -> list[Figure]:
        """Compare the losses of the trainer and of a Session with those of the hand-written loop; they must agree."""
        output = new_output(self._directory)
        run(job(f"allstep.{self.framework}.train", *self._flags(epochs=1), "--output-dir", output, "--log-every", 1))
        ours = [event.loss for event in read_events(output / FILE).steps]
        reference = self._handwritten(1).losses
        [session], mean = self._session(1).losses, statistics.mean(reference)
        pairs = {"largest difference of losses": (ours, reference), "difference of the mean loss": ([session], [mean])}
        return [
            Figure(f"{self.framework}: {what}", one[-1], other[-1], largest_relative_difference(one, other), "<= 1e-4")
            for what, (one, other) in pairs.items()
        ]

    def startup(self) -> float:
        """Return the seconds from the launch of the trainer to the end of its first step."""
        output = new_output(self._directory)
        metrics = output / FILE
        flags = self._flags(epochs=1, num_samples=NUM_RANKS, batch_size=1)
        command = job(f"allstep.{self.framework}.train", *flags, "--output-dir", output, "--log-every", 1)
        return seconds_until(command, lambda: metrics.exists() and '"step"' in metrics.read_text())

    def bare_startup(self) -> float:
        """Return the seconds from a bare launch to its first all-reduce."""
        done = new_output(self._directory)
        return seconds_until(job("allstep.benchmarks.handwritten.bare", self.framework, done), done.exists)

    def check_cost(self) -> Figure:
        """Compare the replica check after an epoch with 100 steps of the same run."""
        checks = new_output(self._directory)
        [printed] = run(program("overhead", "time_checks", self.framework, checks, *self._flags(), num_ranks=NUM_RANKS))
        steps = 100 * statistics.median(BATCH_SIZE * NUM_RANKS / rate for rate in printed_rates(printed))
        _broadcast, _first_step, _first_epoch, *after_epochs = files.read_json(tuple[float, ...], checks)
        check = statistics.median(after_epochs)
        return Figure(f"{self.framework}: replica check / 100 steps", check, steps, check / steps, "<= 0.01")

    def _handwritten(self, num_epochs: int) -> Handwritten:
        module = f"allstep.benchmarks.handwritten.{self.framework}_horovod"
        return run_handwritten(self._directory, lambda output: job(module, output, *self._size(num_epochs)))

    def _session(self, num_epochs: int) -> Handwritten:
        words, size = ("overhead", "train_session", self.framework), self._size(num_epochs)
        return run_handwritten(self._directory, lambda output: program(*words, output, *size, num_ranks=NUM_RANKS))

    def _size(self, num_epochs: int) -> Sequence[object]:
        return "--epochs", num_epochs, "--num-samples", self.effort.num_samples, "--batch-size", BATCH_SIZE

    def _flags(
        self, *, epochs: int | None = None, num_samples: int | None = None, batch_size: int = BATCH_SIZE
    ) -> Sequence[object]:
        flags = trainer_flags(num_samples or self.effort.num_samples, epochs or self.effort.num_epochs)
        return *flags, "--batch-size", batch_size


def train_session(framework: str, *words: str) -> None:
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


def time_checks(framework: str, output: str, *words: str) -> None:
    """Train, and write the seconds of each replica check: after the broadcast, after step 1 and after each epoch."""
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
        files.write_json(Path(output), seconds)


def measure(framework: str, flags: argparse.Namespace, folder: Path) -> tuple[list[Figure], object]:
    """Return the rows of one framework, and the samples of its rounds."""
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"this machine is busy (load {load:.1f}): figures suffer where it has other work", file=sys.stderr)
    bench = TrainerBench(framework, FULL_OR_QUICK[flags.quick], folder)
    same = bench.loss_differences()
    sides = {
        "ours": bench.throughput,
        "handwritten": bench.handwritten_throughput,
        "independent": bench.independent_throughput,
        "session": bench.session_throughput,
    }
    rates = interleaved(sides, bench.effort.num_rounds)
    startups = interleaved({"ours": bench.startup, "bare": bench.bare_startup}, bench.effort.num_rounds)
    first_step = f"{framework}: seconds to first step, more than bare"
    rows = [
        *same,
        compared(f"{framework}: images/s / hand-written", rates["ours"], rates["handwritten"], target=">= 0.98"),
        compared(f"{framework}: images/s by a Session", rates["session"], rates["handwritten"], target=">= 0.98"),
        compared(f"{framework}: images/s / independent", rates["ours"], rates["independent"], target=">= 0.93"),
        compared(first_step, *startups.values(), target="<= 1.0", by=median_difference),
        bench.check_cost(),
    ]
    return rows, {"images_per_second": rates, "startup_seconds": startups}


main = benchmark("overhead", __doc__, measure, flags=QUICK, programs=(time_checks, train_session))

if __name__ == "__main__":
    run_rank(main)
