"""TensorBoard's event files, written without either framework."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from allstep.common.progress import Progress
from allstep.common.reporting.base import Reporter

_FIELDS = {
    "step": ("learning_rate", "loss"),
    "epoch": ("train_loss", "validation_loss", "validation_accuracy", "images_per_second"),
}


class TensorBoard(Reporter):
    """Scalars of steps over steps in `steps/`, and of epochs over epochs in `epochs/`."""

    def __init__(self, directory: Path, progress: Progress) -> None:
        """What a run before told beyond `progress` is hidden by TensorBoard: this run goes on from there."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        # Apart, since TensorBoard hides by number, and an epoch has a lower one than its steps.
        self._writers = {name: EventFileWriter(str(directory / f"{name}s")) for name in _FIELDS}
        if progress.step:
            start = SessionLog(status=SessionLog.START)
            for name, completed in (("step", progress.step), ("epoch", progress.position.epoch)):
                self._writers[name].add_event(Event(wall_time=time.time(), step=completed + 1, session_log=start))

    def event(self, name: str, **fields: Any) -> None:
        if name in _FIELDS:
            values = [self._summary.Value(tag=f"{name}/{field}", simple_value=fields[field]) for field in _FIELDS[name]]
            self._writers[name].add_event(
                self._event(wall_time=time.time(), step=fields[name], summary=self._summary(value=values))
            )

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
