"""The only training loop: both frameworks and all strategies run through it.

It counts in samples, knows no framework and leaves every computation to the worker; so a comparison between
frameworks compares the frameworks, not two loops.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import SupportsFloat

import numpy as np

from allstep.common.datasets.base import Dataset, Split
from allstep.common.errors import Fault, UserError, summary
from allstep.common.instep import check_in_step
from allstep.common.loader import Batch, train_batches, validation_batches
from allstep.common.reporting.base import Reporter
from allstep.common.schedule import Schedule, global_batch_size, learning_rate
from allstep.common.sharding import Position
from allstep.common.weights import checksum
from allstep.common.worker import Worker


@dataclass
class Progress:
    """How far a run has come."""

    position: Position = Position(0, 0)
    """Place in the order of samples."""
    step: int = 0
    """Completed optimizer steps."""
    loss_sum: float = 0.0
    """Sum of the losses of this rank's samples in this epoch."""
    epoch_seconds: float = 0.0
    """Time spent on training steps in this epoch."""
    cumulative_seconds: float = 0.0
    """The same over all completed epochs."""


@dataclass(frozen=True)
class Evaluation:
    """Exact means over all samples of a split."""

    loss: float
    accuracy: float
    num_samples: int


def fit(worker: Worker, dataset: Dataset, schedule: Schedule, reporter: Reporter, *, seed: int, log_every: int) -> None:
    """Train to the schedule's end; check, validate and report after every epoch.

    Raises:
        UserError: the loss is not a finite number any more.
        Fault: the ranks are out of step, or a step failed; the message names the step.
    """
    progress = Progress()
    num_samples = len(dataset.train)
    check_in_step(worker.parameters(), worker.collectives, "after the broadcast")
    while progress.position.epoch < schedule.num_epochs:
        epoch = progress.position.epoch + 1
        train_epoch(worker, dataset.train, schedule, reporter, progress, seed=seed, log_every=log_every)
        check_in_step(worker.parameters(), worker.collectives, f"after epoch {epoch}")
        [train_loss_sum] = worker.collectives.all_reduce_sum(np.array([progress.loss_sum]))
        validation = evaluate(worker, dataset.validation, schedule.global_batch_size)
        progress.cumulative_seconds += progress.epoch_seconds
        reporter.event(
            "epoch",
            epoch=epoch,
            train_loss=train_loss_sum / num_samples,
            validation_loss=validation.loss,
            validation_accuracy=validation.accuracy,
            validation_samples=validation.num_samples,
            epoch_seconds=progress.epoch_seconds,
            cumulative_seconds=progress.cumulative_seconds,
            images_per_second=num_samples / progress.epoch_seconds,
            learning_rate=learning_rate(schedule, epoch * num_samples - 1),
        )
        progress.position, progress.loss_sum, progress.epoch_seconds = Position(epoch, 0), 0.0, 0.0
    reporter.event(
        "end",
        weights_checksum=checksum(worker.export_weights()),
        peak_memory_bytes=worker.peak_memory_bytes(),
    )


def train_epoch(
    worker: Worker,
    split: Split,
    schedule: Schedule,
    reporter: Reporter,
    progress: Progress,
    *,
    seed: int,
    log_every: int,
) -> None:
    """Train from `progress.position` to the end of its epoch; `progress` follows."""
    epoch, num_samples = progress.position.epoch, len(split)
    batches = train_batches(
        split,
        progress.position,
        global_batch_size=lambda offset: global_batch_size(schedule, epoch * num_samples + offset),
        seed=seed,
        rank=worker.collectives.rank,
        world_size=worker.collectives.world_size,
    )
    # The loss of a step is looked at after the next one was started: a GPU never waits for the host.
    unsettled: _Step | None = None
    started = time.perf_counter()
    with _naming_the_step(progress):
        for batch in batches:
            rate = learning_rate(schedule, epoch * num_samples + progress.position.offset)
            taken = _Step(progress.step + 1, worker.train_step(batch, rate), rate, batch)
            if unsettled:
                progress.loss_sum += unsettled.settle()
            unsettled = taken
            progress.step, progress.position = taken.number, batch.position
            if taken.number == 1:
                check_in_step(worker.parameters(), worker.collectives, "after step 1")
            if log_every and taken.number % log_every == 0:
                _report_step(worker, reporter, taken, epoch + batch.position.offset / num_samples)
            reporter.progress(epoch + 1, batch.position.offset, num_samples)
        if unsettled:
            progress.loss_sum += unsettled.settle()
    progress.epoch_seconds += time.perf_counter() - started


@dataclass(frozen=True)
class _Step:
    """A step that was started and whose loss has not been looked at."""

    number: int
    loss_sum: SupportsFloat
    learning_rate: float
    batch: Batch

    def settle(self) -> float:
        """The sum of the losses of this rank's samples, once the device has it."""
        loss_sum = float(self.loss_sum) if self.batch.num_samples else 0.0
        if not math.isfinite(loss_sum):
            raise UserError(
                f"expected a finite loss, received {loss_sum} at step {self.number} with learning rate "
                f"{self.learning_rate:g}; lower --base-lr or lengthen --warmup-epochs"
            )
        return loss_sum


def _report_step(worker: Worker, reporter: Reporter, step: _Step, epoch: float) -> None:
    [loss_sum] = worker.collectives.all_reduce_sum(np.array([step.settle()]))
    reporter.event("step", step=step.number, epoch=epoch, learning_rate=step.learning_rate,
                   loss=loss_sum / step.batch.num_global)


@contextmanager
def _naming_the_step(progress: Progress) -> Iterator[None]:
    try:
        yield
    except (UserError, Fault):
        raise
    except Exception as error:
        raise Fault(f"step {progress.step + 1} failed: {summary(error)}") from error


def evaluate(worker: Worker, split: Split, global_batch: int) -> Evaluation:
    """Mean loss and accuracy with every sample counted once over all ranks, for any number of ranks."""
    collectives = worker.collectives
    sums = np.zeros(3)
    for batch in validation_batches(split, global_batch, rank=collectives.rank, world_size=collectives.world_size):
        if batch.num_samples:
            sums += (*worker.eval_step(batch), batch.num_samples)
    loss_sum, num_correct, num_samples = collectives.all_reduce_sum(sums)
    return Evaluation(loss_sum / num_samples, num_correct / num_samples, int(num_samples))
