"""Beginning of a run: at its start, or from a checkpoint or a commit; its trace, and files of an earlier run."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from allstep.common.base.errors import UserError, warn
from allstep.common.checkpoint import TrainState
from allstep.common.config.train_config import OutputConfig, TrainConfig
from allstep.common.exact import environment_fingerprint, trace
from allstep.common.files.disk import unused
from allstep.common.launch.variables import read_num_threads
from allstep.common.recipe.progress import Progress
from allstep.common.recipe.schedule import Schedule, make_schedule
from allstep.common.reporting.base import output_dir_errors
from allstep.common.training import resuming, saving
from allstep.common.training.description import Description
from allstep.common.training.opening import check_batch_memory
from allstep.common.training.worker import StepTrace, Worker

if TYPE_CHECKING:
    from allstep.common.training.training_run import TrainingRun


def load_state(run: TrainingRun, data: Mapping[str, str], description: Description | None) -> TrainState | None:
    """Return the state to resume, on every rank, or None; load weights of --init-from directly into the worker."""
    config, worker, output = run.config, run.worker, run.config.output
    if not (output.resume or output.init_from):
        return None
    state = None
    if run.placement.rank == 0:  # it checks all of it, so the other ranks receive valid state
        num_samples = len(run.dataset.train)
        state = resuming.load(config, num_samples, worker.state_shapes(), warn, data, description)
        now = environment_fingerprint.describe(config, worker.versions())
        if output.resume and (changed := environment_fingerprint.differences(now, state.versions)):
            warn(changed)
        if output.resume and state.progress.epoch == config.schedule.epochs:
            warn(f"the checkpoint has all {state.progress.epoch} epochs, so none is trained; raise --epochs to go on")
    state = saving.broadcast_state(state, worker.collectives)
    if output.resume:
        return state
    worker.import_state(state.arrays, step=0)
    return None


def begin(run: TrainingRun, state: TrainState | None) -> Schedule:
    """Take over `state`, of a checkpoint or a commit, if there is any, and return the schedule of the run."""
    worker, config = run.worker, run.config
    global_batch_size = _global_batch_size(config, worker.collectives.world_size, state)
    schedule = make_schedule(config, len(run.dataset.train), global_batch_size)
    check_batch_memory(schedule, run.dataset, run.placement)
    if state:
        run.progress = saving.resume(worker, state)
        if schedule.decay == state.schedule["decay"] == "plateau":
            run.progress.lr_drops = tuple(state.schedule["milestones"] or ())
    if config.schedule.follows_noise:
        _follow_noise(run.progress, worker, state)
    return schedule


def _global_batch_size(config: TrainConfig, world_size: int, state: TrainState | None) -> int:
    """Return the global batch size of the flags; without them a resumed run keeps its size, on any number of ranks."""
    flags = config.schedule
    if state and flags.batch_size is None and flags.global_batch_size is None:
        return state.schedule["global_batch_size"]
    return config.global_batch_size(world_size)


def _follow_noise(progress: Progress, worker: Worker, state: TrainState | None) -> None:
    """Restore the growth of the global batch under --batch-ramp auto, which follows the gradient noise scale.

    Raises UserError if there is only one part of a batch, so the noise scale cannot be measured.
    """
    if not worker.num_parts:
        raise UserError(
            "expected two ranks, devices or passes at least with --batch-ramp auto, whose gradients are compared, "
            "received one; start more, or give --accumulate-steps 2"
        )
    if state and state.config.get("batch-ramp") == ["auto"]:
        progress.batch_ramp = tuple((epoch, factor) for epoch, factor in state.schedule["batch_ramp"])


def goes_on(flags: OutputConfig, directory: Path) -> bool:
    """Return whether a run resumes the one in `directory`; the files of any other run would mix with those there."""
    if flags.resume in (None, "latest", "best"):
        return flags.resume is not None
    return Path(flags.resume).resolve().is_relative_to(directory.resolve())


def set_aside(directory: Path) -> None:
    """Move an earlier run's files into a separate folder, so that a new run neither loses nor continues them."""
    left = [
        directory / name
        for name in ("metrics.jsonl", "config.yaml", "checkpoints", "tensorboard", "profile", trace.FOLDER)
    ]
    left = [path for path in left if os.path.lexists(path)]
    if left:
        aside = unused(directory / "previous")
        with output_dir_errors(aside):
            aside.mkdir()
            for path in left:
                path.rename(aside / path.name)
        warn(f"the run that {directory} held is kept in {aside}; --resume latest would have gone on with it")


def start_trace(run: TrainingRun, device: str) -> StepTrace:
    """Have the steps of `run` on this rank's `device` recorded in its output directory, until the result is closed."""
    worker, placement, config = run.worker, run.placement, run.config
    directory = config.output.output_dir
    assert directory is not None  # `validate` asks for one
    worker.collectives.barrier()  # rank 0 has moved an earlier run out of the way

    def open_recorder(activations: Sequence[str], parameters: Sequence[str]) -> trace.Recorder:
        header = trace.Header(
            rank=placement.rank,
            world_size=placement.world_size,
            local_size=placement.local_size,
            framework=worker.framework,
            launcher=placement.launcher,
            host=platform.node(),
            processor=environment_fingerprint.processor(),
            device=device,
            num_threads=read_num_threads(os.environ),
            versions={"python": platform.python_version(), **worker.versions()},
            config=config.flat(),
            slices=config.parallel.num_slices,
            activations=tuple(activations),
            parameters=tuple(parameters),
        )
        return trace.Recorder(directory / trace.FOLDER, header, run.progress.step)

    return worker.trace(open_recorder)
