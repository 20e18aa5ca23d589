"""TensorBoard's event files, written without either framework."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from allstep.common.reporting.base import Reporter

_OF_STEPS = ("learning_rate", "loss")
_OF_EPOCHS = ("train_loss", "validation_loss", "validation_accuracy", "images_per_second")


class TensorBoard(Reporter):
    """Scalars of steps over steps and of epochs over epochs."""

    def __init__(self, directory: Path, *, purge_step: int) -> None:
        """Events beyond `purge_step` of a run before are hidden by TensorBoard: this run goes on from there."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(directory))
        if purge_step:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=purge_step + 1, session_log=start))

    def event(self, name: str, **fields: Any) -> None:
        names = {"step": _OF_STEPS, "epoch": _OF_EPOCHS}.get(name, ())
        values = [self._summary.Value(tag=f"{name}/{field}", simple_value=fields[field]) for field in names]
        if values:
            self._writer.add_event(
                self._event(wall_time=time.time(), step=fields[name], summary=self._summary(value=values))
            )

    def close(self) -> None:
        self._writer.close()
