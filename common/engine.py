"""The only training loop: both frameworks and all strategies run through it.

It counts in samples, knows no framework and leaves every computation to the worker; so a comparison between
frameworks compares the frameworks, not two loops.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from allstep.common.audit import UnequalBits, audited_steps
from allstep.common.data.loader import Batch, train_batches
from allstep.common.data.sharding import Position
from allstep.common.evaluation import Evaluation, Stopped, evaluate
from allstep.common.hooks import StopTraining
from allstep.common.noise_scale import is_measured, noise_scale
from allstep.common.process.errors import Fault, UserError, summary
from allstep.common.progress import Progress
from allstep.common.reporting.base import Reporter
from allstep.common.schedule import Schedule, global_batch_size, grown, learning_rate
from allstep.common.watch import ProgressState
from allstep.common.weights import checksum
from allstep.common.worker import StepResult

if TYPE_CHECKING:
    from allstep.common.session import Session


class Saver(Protocol):
    """Where the engine leaves the run's state; `common.saving` has the real one."""

    def due(self, step: int) -> bool:
        """Whether to save in mid-epoch after `step`."""
        ...

    def save(self, progress: Progress, score: float | None = None) -> None:
        """Save the run as it stands, which has just been validated with `score`, higher for better; every rank calls
        this at the same step.
        """
        ...


@dataclass(frozen=True)
class Run:
    """A session while it trains."""

    session: Session
    schedule: Schedule
    reporter: Reporter
    saver: Saver
    progress_state: ProgressState
    """What the engine reports to the watch, and what the watch asks of it."""
    compile_seconds: dict[int, float] = field(default_factory=dict)
    """Under --compile: how long it took to compile the step for global batches of each size so far."""


DIVERGED = "expected a finite"
"""How the error of a run begins whose learning rate was too high."""


def fit(run: Run) -> bool:
    """Train from the session's progress to the schedule's end; check, validate, report and save after every epoch.

    Returns: whether it came to the end; else the ranks were asked to stop, and the run is saved as it stands.

    Raises:
        UserError: a loss is not a finite number any more, or a checkpoint cannot be written.
        Fault: the ranks are out of step, or a step failed; the message names the step.
    """
    with _naming_the_step(run.progress_state, deterministic=run.session.config.same_bits):
        is_through = True
        try:
            _fit(run)
        except StopTraining:
            pass
        except Stopped:
            progress = run.session.progress
            run.progress_state.step = progress.step
            run.saver.save(progress)
            is_through = False
        for hook in run.session.hooks:
            hook.on_end(run.session)
    return is_through


def _fit(run: Run) -> None:
    session, worker, progress = run.session, run.session.worker, run.session.progress
    run.progress_state.step = progress.step
    for hook in session.hooks:
        hook.on_start(session)
    session.check_replicas(worker.parameters(), worker.collectives, "after the broadcast")
    while progress.position.epoch < run.schedule.num_epochs and not _stops_early(session):
        epoch = progress.position.epoch + 1
        train_epoch(run)
        run.progress_state.step = progress.step
        run.progress_state.enter("check")
        session.check_replicas(worker.parameters(), worker.collectives, f"after epoch {epoch}")
        run.progress_state.enter("sums")
        own_sums = np.array([progress.loss_sum, progress.noise.variance, progress.noise.square])
        train_loss_sum, *noise = worker.collectives.all_reduce_sum(own_sums)
        worker.average_statistics()
        validation = _evaluate(run)
        if not math.isfinite(validation.loss):
            raise UserError(
                f"{DIVERGED} validation loss, received {validation.loss} after epoch {epoch}; lower --base-lr "
                "or lengthen --warmup-epochs"
            )
        averaged = {}
        if session.config.optimizer.ema is not None:
            with worker.averaged_weights():
                ema = _evaluate(run)
            averaged = {"ema_validation_loss": ema.loss, f"ema_validation_{session.metric}": ema.metric}
        epoch_seconds, num_trained = progress.epoch_seconds, progress.position.offset
        _finish_epoch(progress, validation)
        metrics = session.metrics()
        if session.config.precision == "fp16":
            metrics = {**metrics, "skipped_steps": progress.loss_scale.skipped_steps}
        if session.config.parallel.compile:
            metrics = {**metrics, "compile_seconds": sum(run.compile_seconds.values())}
        if (scale := noise_scale(*noise)) is not None:
            metrics = {**metrics, "gradient_noise_scale": scale}
        if session.config.schedule.follows_noise:
            progress.batch_ramp = grown(run.schedule, progress.batch_ramp, epoch=epoch, noise_scale=scale)
        run.progress_state.enter("reporting")
        run.reporter.event(
            "epoch",
            epoch=epoch,
            train_loss=train_loss_sum / num_trained,
            validation_loss=validation.loss,
            validation_samples=validation.num_samples,
            epoch_seconds=epoch_seconds,
            cumulative_seconds=progress.cumulative_seconds,
            images_per_second=num_trained / epoch_seconds,
            learning_rate=progress.learning_rate,
            **{f"validation_{session.metric}": validation.metric},
            **averaged,
            **metrics,
        )
        run.saver.save(progress, validation.metric if session.metric == "accuracy" else -validation.metric)
        for hook in session.hooks:
            hook.on_epoch(session)
    run.reporter.event(
        "end",
        weights_checksum=checksum(worker.export_weights()),
        peak_memory_bytes=worker.peak_memory_bytes(),
        **session.metrics(),
    )


def _stops_early(session: Session) -> bool:
    # Every rank decides alike: the validation loss is the same number on all of them.
    return 0 < session.config.schedule.early_stop_patience <= session.progress.epochs_without_gain


def _finish_epoch(progress: Progress, validation: Evaluation) -> None:
    progress.position = Position(progress.position.epoch + 1, 0)
    progress.cumulative_seconds += progress.epoch_seconds
    progress.loss_sum = progress.epoch_seconds = 0.0
    gained = validation.loss < progress.best_validation_loss
    progress.best_validation_loss = min(validation.loss, progress.best_validation_loss)
    progress.epochs_without_gain = 0 if gained else progress.epochs_without_gain + 1


def train_epoch(run: Run) -> None:
    """Train from the session's progress to the end of its epoch; the progress follows.

    Raises:
        Stopped: see there.
    """
    session, progress_state = run.session, run.progress_state
    schedule = replace(run.schedule, batch_ramp=session.progress.batch_ramp or run.schedule.batch_ramp)
    worker, progress, config = session.worker, session.progress, session.config
    split = session.dataset.training_split
    log_every, scales_loss = config.output.log_every, config.precision == "fp16"
    steps_in_flight = session.strategy.steps_in_flight
    if scales_loss and steps_in_flight == 1:
        steps_in_flight = 0  # whether a step overflowed decides on the scale of the next
    epoch, num_samples = progress.position.epoch, len(split)
    batches = train_batches(
        split,
        progress.position,
        global_batch_size=lambda offset: global_batch_size(schedule, epoch * num_samples + offset),
        seed=config.data.seed,
        rank=worker.collectives.rank,
        world_size=worker.collectives.world_size,
        drop_last=config.schedule.drop_last,
        num_slices=config.parallel.num_slices,
        audited=audited_steps(config.parallel.audit, seed=config.data.seed, epoch=epoch),
        curriculum=session.dataset.curriculum,
    )
    # The loss of a step is looked at after the next one was started: a GPU never waits for the host.
    unsettled: deque[_Step] = deque()
    started = time.perf_counter()

    def settle(num_left: int = 0) -> None:
        nonlocal started
        while len(unsettled) > num_left:
            step = unsettled.popleft()
            loss_sum = step.settle()
            progress.loss_sum += loss_sum
            if step.loss_scale is not None:
                overflowed = int(step.result.overflow) > 0
                progress.loss_scale = progress.loss_scale.after(step.loss_scale, overflowed=overflowed)
            if worker.num_parts and is_measured(step.number):
                squares = float(step.result.squares_of_parts), float(step.result.square_of_average)
                progress.noise = progress.noise.after(*squares, step.batch.num_global, num_parts=worker.num_parts)
            if log_every and step.number % log_every == 0:
                _report_step(run, step, loss_sum, epoch + step.batch.position.offset / num_samples)
        now = time.perf_counter()
        progress.epoch_seconds, started = progress.epoch_seconds + now - started, now

    progress_state.step = progress.step + 1
    progress_state.enter("input")
    for batch in batches:
        if not progress_state.begin_tick():
            settle()
            raise Stopped
        if config.parallel.compile and batch.num_global not in run.compile_seconds:
            settle()
            progress_state.enter("compile")
            worker.compile(batch)
            # All ranks did it together, so this time is nobody's waiting for another one in a step.
            run.compile_seconds[batch.num_global] = time.perf_counter() - started
            started = time.perf_counter()
        progress_state.enter("step")
        rate = learning_rate(schedule, epoch * num_samples + progress.position.offset)
        loss_scale = progress.loss_scale.value if scales_loss else None
        step = _Step(progress.step + 1, worker.train_step(batch, rate, loss_scale or 1.0), rate, loss_scale, batch)
        unsettled.append(step)
        settle(steps_in_flight)
        progress.step, progress.position, progress.learning_rate = step.number, batch.position, rate
        for hook in session.hooks:
            hook.on_step(session)
        if step.number == 1:
            progress_state.enter("check")
            session.check_replicas(worker.parameters(), worker.collectives, "after step 1")
        if run.saver.due(step.number) and batch.position.offset < num_samples:
            settle()
            run.saver.save(progress)
        progress_state.enter("reporting")
        run.reporter.progress(epoch + 1, batch.position.offset, num_samples)
        progress_state.step = progress.step + 1
        progress_state.enter("input")
    settle()


@dataclass(frozen=True)
class _Step:
    """A step that was started and whose loss has not been looked at."""

    number: int
    result: StepResult
    learning_rate: float
    loss_scale: float | None
    """None but with --precision fp16."""
    batch: Batch

    def settle(self) -> float:
        """The sum of the losses of this rank's samples, once the device has it."""
        # With --slices rank 0 has the losses of all.
        loss_sum = float(self.result) if self.batch.num_samples or self.batch.slices else 0.0
        if not math.isfinite(loss_sum):
            raise UserError(
                f"{DIVERGED} loss, received {loss_sum} at step {self.number} with learning rate "
                f"{self.learning_rate:g}; lower --base-lr or lengthen --warmup-epochs"
            )
        return loss_sum


def _report_step(run: Run, step: _Step, loss_sum: float, epoch: float) -> None:
    run.progress_state.enter("sums")
    [loss_sum] = run.session.worker.collectives.all_reduce_sum(np.array([loss_sum]))
    run.progress_state.enter("reporting")
    scaled = {} if step.loss_scale is None else {"loss_scale": step.loss_scale}
    loss = loss_sum / step.batch.num_global
    run.reporter.event("step", step=step.number, epoch=epoch, learning_rate=step.learning_rate, loss=loss, **scaled)
    run.progress_state.enter("step")


@contextmanager
def _naming_the_step(progress_state: ProgressState, *, deterministic: bool) -> Iterator[None]:
    try:
        yield
    except (UserError, Fault):
        raise
    except UnequalBits as error:
        raise Fault(f"the audit of {progress_state.where} found unequal bits: {error}") from None
    except Exception as error:
        if deterministic and "determinis" in str(error):  # so both frameworks say of what they have no such form of
            raise UserError(
                f"expected operations that have a deterministic form, received one in {progress_state.where} that has "
                f"none: {summary(error)}; leave out --deterministic and --slices"
            ) from None
        raise Fault(f"{progress_state.where} failed: {summary(error)}") from error


def _evaluate(run: Run) -> Evaluation:
    session = run.session
    return evaluate(
        session.worker,
        session.dataset.validation,
        run.schedule.global_batch_size,
        run.progress_state,
        num_slices=session.config.parallel.num_slices,
    )
