"""Conversion between a run and its checkpoints: saving its state, and resuming all ranks from one.

Only rank 0 reads and writes files, and sends the state that it reads to the other ranks. Nothing is pickled: a JSON
header gives names, shapes and types of the arrays, which follow it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from allstep.common.base.collectives import Collectives
from allstep.common.checkpoint import Checkpoints, TrainState
from allstep.common.checkpoint import Progress as SavedProgress
from allstep.common.checkpoint.state import content_of
from allstep.common.data.sharding import Position
from allstep.common.exact import environment_fingerprint
from allstep.common.files.strict_json import to_json
from allstep.common.recipe.loss_scale import LossScale
from allstep.common.recipe.noise_scale import NoiseScale
from allstep.common.recipe.progress import Progress
from allstep.common.recipe.schedule import Schedule, adapted
from allstep.common.training.description import Description
from allstep.common.training.worker import Worker
from allstep.common.watch import ProgressState

if TYPE_CHECKING:
    from allstep.common.training.training_run import TrainingRun


class Commits:
    """Newest state of an elastic job, in the memory of each rank."""

    def __init__(self, every: int) -> None:
        """Start without a commit; `every` is the number of steps between two commits."""
        self.every = every
        self.newest: TrainState | None = None
        self.constants: Collection[str] = ()
        """Names of arrays that may hold nan and infinity."""

    def keep(self, state: TrainState) -> None:
        """Commit a copy of `state`, whose arrays may be changed afterwards."""
        self.newest = dataclasses.replace(state, arrays={name: array.copy() for name, array in state.arrays.items()})

    def agree(self, collectives: Collectives) -> TrainState | None:
        """Return the newest commit of any rank, and store it on all ranks; None if there is none yet."""
        own = self.newest.progress.step if self.newest else -1
        steps = collectives.all_gather(np.array([own], np.int64))[:, 0]
        if steps.max() >= 0:
            root = int(steps.argmax())
            state = self.newest if collectives.rank == root else None
            self.newest = broadcast_state(state, collectives, root)
        return self.newest


class Saver:
    """Saves a run every `every` steps (0: never in mid-epoch) and when the engine asks for it.

    All ranks take part, since each may hold a part of the state; only rank 0 has `checkpoints`.
    """

    def __init__(
        self,
        run: TrainingRun,
        schedule: Schedule,
        checkpoints: Checkpoints | None,
        progress_state: ProgressState,
        *,
        data: Mapping[str, str],
        description: Description | None,
    ) -> None:
        """Prepare to save the run; `data` are digests of its data set, `description` is what it is trained on."""
        self._run, self._schedule, self._checkpoints, self._progress_state = run, schedule, checkpoints, progress_state
        self._data, self._description = dict(data), to_json(description) if description else {}
        self._config = run.config.flat()
        self._versions = environment_fingerprint.describe(run.config, run.worker.versions())
        self._every, self._active = run.config.output.checkpoint_every, run.config.output.output_dir is not None
        self._saved: tuple[int, Position] | None = None

    def due(self, step: int) -> bool:
        """Return whether to save in mid-epoch after `step`."""
        return self._is_checkpoint(step) or (self._run.commits is not None and step % self._run.commits.every == 0)

    def save(self, progress: Progress, score: float | None = None) -> None:
        """Save the current state, validated with `score` (higher is better); every rank calls this at the same step."""
        if (not self._active and self._run.commits is None) or self._saved == (progress.step, progress.position):
            return
        self._saved = progress.step, progress.position
        self._progress_state.enter("checkpoint")
        local_sums = np.array([progress.loss_sum, progress.noise.variance, progress.noise.square])
        sums = self._run.worker.collectives.all_reduce_sum(local_sums).tolist()
        self._run.worker.average_statistics()
        state = self._state(progress, self._run.worker.export_state(), sums)
        self._progress_state.enter("writing")
        if self._run.commits is not None:
            self._run.commits.keep(state)
            if progress.position.offset and not self._is_checkpoint(progress.step) and not self._progress_state.notice:
                return
        if self._checkpoints:
            self._checkpoints.save(state, metric=score)
        for hook in self._run.hooks:
            hook.on_save(self._run)

    def _is_checkpoint(self, step: int) -> bool:
        return self._active and self._every > 0 and step % self._every == 0

    def _state(self, progress: Progress, arrays: dict[str, np.ndarray], sums: Sequence[float]) -> TrainState:
        epoch, offset = progress.position.epoch, progress.position.offset
        schedule = adapted(self._schedule, progress)
        return TrainState(
            framework=self._run.worker.framework,
            arrays=arrays,
            progress=SavedProgress(
                epoch=epoch,
                offset=offset,
                step=progress.step,
                samples_seen=epoch * self._schedule.samples_per_epoch + offset,
                running={
                    **{name: getattr(progress, name) for name in _RUNNING},
                    **dict(zip(("loss_sum", "noise_variance", "noise_square"), sums, strict=True)),
                    "loss_scale": progress.loss_scale.value,
                    "good_steps": progress.loss_scale.good_steps,
                    "skipped_steps": progress.loss_scale.skipped_steps,
                },
            ),
            # Order, augmentation and initial weights are functions of the seed, and nothing else is random.
            rng={"seed": self._config["seed"]},
            schedule=json.loads(json.dumps(dataclasses.asdict(schedule))),
            config=self._config,
            versions=self._versions,
            data=self._data,
            description=self._description,
        )


_RUNNING = ("learning_rate", "epoch_seconds", "cumulative_seconds", "best_validation_loss", "epochs_without_gain")


def resume(worker: Worker, state: TrainState) -> Progress:
    """Load a saved state, which `resuming` has checked, into every rank's worker, and return the run's progress."""
    saved, running = state.progress, state.progress.running
    loss_scale = LossScale()
    if "loss_scale" in running:
        good_steps, skipped_steps = int(running["good_steps"]), int(running["skipped_steps"])
        loss_scale = LossScale(running["loss_scale"], good_steps, skipped_steps)
    worker.import_state(state.arrays, saved.step - loss_scale.skipped_steps)
    noise = NoiseScale()
    if worker.collectives.rank == 0 and "noise_square" in running:
        noise = NoiseScale(running["noise_variance"], running["noise_square"])
    return Progress(
        position=Position(saved.epoch, saved.offset),
        step=saved.step,
        loss_scale=loss_scale,
        # Sums over all ranks were saved; rank 0 continues them.
        noise=noise,
        loss_sum=running["loss_sum"] if worker.collectives.rank == 0 else 0.0,
        learning_rate=running["learning_rate"],
        epoch_seconds=running["epoch_seconds"],
        cumulative_seconds=running["cumulative_seconds"],
        best_validation_loss=running["best_validation_loss"],
        epochs_without_gain=int(running["epochs_without_gain"]),
    )


def broadcast_state(state: TrainState | None, collectives: Collectives, root: int = 0) -> TrainState:
    """Return the state of rank `root` on every rank; the others pass None."""

    def broadcast(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return collectives.broadcast_arrays(arrays, root=root)

    header = b""
    if state is not None:
        plain = {**content_of(state), "progress": dataclasses.asdict(state.progress)}
        plain["arrays"] = {name: (array.shape, array.dtype.str) for name, array in state.arrays.items()}
        header = json.dumps(plain).encode()
    size = broadcast({"size": np.array([len(header)], np.int64)})["size"][0]
    text = np.frombuffer(header, np.uint8) if state is not None else np.zeros(size, np.uint8)
    plain = json.loads(broadcast({"header": text})["header"].tobytes())
    arrays = (
        state.arrays
        if state is not None
        else {name: np.zeros(shape, dtype) for name, (shape, dtype) in plain["arrays"].items()}
    )
    return TrainState(**{**plain, "progress": SavedProgress(**plain["progress"]), "arrays": broadcast(arrays)})
