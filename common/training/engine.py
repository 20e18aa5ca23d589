"""Training loop of both frameworks and all strategies.

It counts in samples, depends on no framework and leaves every computation to the worker, so a comparison between
frameworks compares the frameworks, not two loops.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from allstep.common.base.errors import Fault, UserError, summary
from allstep.common.data.loader import Batch, train_batches
from allstep.common.exact.audit import UnequalBits, audited_steps
from allstep.common.recipe.noise_scale import noise_scale
from allstep.common.recipe.schedule import Schedule, adapted, dropped, global_batch_size, grown, learning_rate
from allstep.common.recipe.weights import checksum
from allstep.common.reporting.base import Reporter
from allstep.common.training.hooks import StopTraining
from allstep.common.training.metrics import Evaluation, Stopped, evaluate
from allstep.common.training.steps_in_flight import DIVERGED, StartedStep, StepsInFlight
from allstep.common.watch import ProgressState

if TYPE_CHECKING:
    from allstep.common.training.saving import Saver
    from allstep.common.training.training_run import TrainingRun


@dataclass(frozen=True)
class Run:
    """Session in training, with its schedule, reporter and saver."""

    session: TrainingRun
    schedule: Schedule
    reporter: Reporter
    saver: Saver
    progress_state: ProgressState
    """State that the engine reports to the watchdog, and requests of the watchdog to the engine."""
    compile_seconds: dict[int, float] = field(default_factory=dict)
    """Seconds, with --compile, that it took to compile the step, by size of the global batch."""


def fit(run: Run) -> bool:
    """Train from the session's progress to the schedule's end; check, validate, report and save after every epoch.

    The result tells whether the run has reached its end; if not, the ranks were asked to stop, and the current state is
    saved. Raises UserError if a loss is not finite, or a checkpoint cannot be written; Fault, which names the step, if
    the ranks have diverged or a step failed.
    """
    is_done, progress = True, run.session.progress
    with _naming_the_step(run.progress_state, deterministic=run.session.config.same_bits):
        try:
            _fit(run)
        except (StopTraining, Stopped) as reason:
            run.progress_state.step = progress.step
            if progress.step:  # a hook may end a run before its first step
                run.saver.save(progress)
            is_done = isinstance(reason, StopTraining)
        if is_done:
            _report_end(run)
        run.progress_state.enter("hooks")
        for hook in run.session.hooks:
            hook.on_end(run.session)
    return is_done


def _fit(run: Run) -> None:
    session, worker, progress = run.session, run.session.worker, run.session.progress
    run.progress_state.step = progress.step
    for hook in session.hooks:
        hook.on_start(session)
    session.check_replicas(worker.parameters(), worker.collectives, "after the broadcast")
    patience = session.config.schedule.early_stop_patience or math.inf
    # All ranks decide the same, because the validation loss is the same number on all of them.
    while progress.position.epoch < run.schedule.num_epochs and progress.epochs_without_gain < patience:
        _train_epoch(run)
        _finish_epoch(run)


def _report_end(run: Run) -> None:
    session, worker = run.session, run.session.worker
    run.reporter.event(
        "end",
        weights_checksum=checksum(worker.export_weights()),
        peak_memory_bytes=worker.peak_memory_bytes(),
        **session.metrics(),
    )


def _train_epoch(run: Run) -> None:
    """Train from the session's progress to the end of its epoch, and update the progress.

    Raises Stopped if the ranks were asked to stop.
    """
    session, progress_state = run.session, run.progress_state
    worker, progress = session.worker, session.progress
    schedule = adapted(run.schedule, progress)
    scales_loss = session.config.precision == "fp16"
    epoch, num_samples = progress.position.epoch, len(session.dataset.training_split)
    steps = StepsInFlight(
        progress,
        # With synchronous steps, the overflow of a step decides the loss scale of the next one.
        maximum=0 if scales_loss and session.strategy.steps_in_flight == 1 else session.strategy.steps_in_flight,
        num_parts=worker.num_parts,
        on_result=partial(_report_step, run),
    )
    progress_state.step = progress.step + 1
    progress_state.enter("input")
    for batch in _batches(session, schedule):
        if not progress_state.begin_tick():
            steps.finish()
            raise Stopped
        if session.config.parallel.compile and batch.num_global not in run.compile_seconds:
            steps.finish()
            progress_state.enter("compile")
            worker.compile(batch)
            # All ranks compile at the same point, so that none waits for another one in a step.
            run.compile_seconds[batch.num_global] = steps.restart_clock()
        progress_state.enter("step")
        rate = learning_rate(schedule, epoch * num_samples + progress.position.offset)
        loss_scale = progress.loss_scale.value if scales_loss else None
        result = worker.train_step(batch, rate, loss_scale or 1.0)
        steps.add(StartedStep(progress.step + 1, batch, rate, loss_scale, result))
        progress.step, progress.position, progress.learning_rate = progress.step + 1, batch.position, rate
        try:
            for hook in session.hooks:
                hook.on_step(session)
        except StopTraining:
            steps.finish()
            raise
        if progress.step == 1:
            progress_state.enter("check")
            session.check_replicas(worker.parameters(), worker.collectives, "after step 1")
        if run.saver.due(progress.step) and batch.position.offset < num_samples:
            steps.finish()
            run.saver.save(progress)
        progress_state.enter("reporting")
        run.reporter.progress(epoch + 1, batch.position.offset, num_samples)
        progress_state.step = progress.step + 1
        progress_state.enter("input")
    steps.finish()


def _batches(session: TrainingRun, schedule: Schedule) -> Iterator[Batch]:
    """Return this rank's batches from the session's progress to the end of its epoch."""
    split, position = session.dataset.training_split, session.progress.position
    config, collectives = session.config, session.worker.collectives
    return train_batches(
        split,
        position,
        global_batch_size=lambda offset: global_batch_size(schedule, position.epoch * len(split) + offset),
        seed=config.data.seed,
        rank=collectives.rank,
        world_size=collectives.world_size,
        drop_last=config.schedule.drop_last,
        num_slices=config.parallel.num_slices,
        audited=audited_steps(config.parallel.audit, seed=config.data.seed, epoch=position.epoch),
        sampler=session.dataset.sampler,
    )


def _report_step(run: Run, step: StartedStep, loss_sum: float) -> None:
    session, log_every = run.session, run.session.config.output.log_every
    if not log_every or step.number % log_every:
        return
    run.progress_state.enter("sums")
    [loss_sum] = session.worker.collectives.all_reduce_sum(np.array([loss_sum]))
    run.progress_state.enter("reporting")
    position = step.batch.position
    run.reporter.event(
        "step",
        step=step.number,
        epoch=position.epoch + position.offset / len(session.dataset.training_split),
        learning_rate=step.learning_rate,
        loss=loss_sum / step.batch.num_global,
        **({} if step.loss_scale is None else {"loss_scale": step.loss_scale}),
    )
    run.progress_state.enter("step")


def _finish_epoch(run: Run) -> None:
    """Check that the ranks are in sync, validate, report and save."""
    session, worker, progress = run.session, run.session.worker, run.session.progress
    epoch, num_trained = progress.position.epoch + 1, progress.position.offset
    run.progress_state.step = progress.step
    run.progress_state.enter("check")
    session.check_replicas(worker.parameters(), worker.collectives, f"after epoch {epoch}")
    run.progress_state.enter("sums")
    local_sums = np.array([progress.loss_sum, progress.noise.variance, progress.noise.square])
    train_loss_sum, *noise = worker.collectives.all_reduce_sum(local_sums)
    worker.average_statistics()
    validation = _evaluate(run)
    if not math.isfinite(validation.loss):
        raise UserError(
            f"{DIVERGED} validation loss, received {validation.loss} after epoch {epoch}; lower --base-lr "
            "or lengthen --warmup-epochs"
        )
    scores = validation.fields()
    if session.config.optimizer.ema is not None:
        with worker.averaged_weights():
            averaged = _evaluate(run)
        scores |= averaged.fields("ema_")
    epoch_seconds = progress.epoch_seconds
    progress.finish_epoch(validation.loss)
    scale = noise_scale(*noise)
    if session.config.schedule.follows_noise:
        progress.batch_ramp = grown(run.schedule, progress.batch_ramp, epoch=epoch, noise_scale=scale)
    progress.lr_drops = dropped(
        run.schedule,
        progress.lr_drops,
        epoch=epoch,
        epochs_without_gain=progress.epochs_without_gain,
        patience=session.config.schedule.plateau_patience,
    )
    metrics = _metrics(run, scale)
    run.progress_state.enter("reporting")
    run.reporter.event(
        "epoch",
        epoch=epoch,
        train_loss=float(train_loss_sum / num_trained),
        **scores,
        validation_samples=validation.num_samples,
        epoch_seconds=epoch_seconds,
        cumulative_seconds=progress.cumulative_seconds,
        images_per_second=num_trained / epoch_seconds,
        learning_rate=progress.learning_rate,
        **metrics,
    )
    run.saver.save(progress, session.validation_metrics.score(validation.loss, validation.metrics))
    run.progress_state.enter("hooks")
    for hook in session.hooks:
        hook.on_epoch(session)


def _metrics(run: Run, gradient_noise_scale: float | None) -> dict[str, float]:
    """Return the metrics that only some flags add to the event of an epoch; all ranks call it."""
    session, config = run.session, run.session.config
    metrics = dict(session.metrics())
    if config.precision == "fp16":
        metrics["skipped_steps"] = session.progress.loss_scale.skipped_steps
    if config.parallel.compile:
        metrics["compile_seconds"] = sum(run.compile_seconds.values())
    if gradient_noise_scale is not None:
        metrics["gradient_noise_scale"] = float(gradient_noise_scale)
    return metrics


def _evaluate(run: Run) -> Evaluation:
    session = run.session
    return evaluate(
        session.worker,
        session.dataset.validation,
        run.schedule.global_batch_size,
        run.progress_state,
        session.validation_metrics,
        num_slices=session.config.parallel.num_slices,
    )


@contextmanager
def _naming_the_step(progress_state: ProgressState, *, deterministic: bool) -> Iterator[None]:
    try:
        yield
    except (UserError, Fault):
        raise
    except UnequalBits as error:
        raise Fault(f"the audit of {progress_state.where} found unequal bits: {error}") from None
    except Exception as error:
        if deterministic and "determinis" in str(error):  # both frameworks use the word in this error
            raise UserError(
                f"expected operations that have a deterministic form, received one in {progress_state.where} that has "
                f"none: {summary(error)}; leave out --deterministic and --slices"
            ) from None
        raise Fault(f"{progress_state.where} failed: {summary(error)}") from error
