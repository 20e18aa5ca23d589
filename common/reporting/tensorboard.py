"""TensorBoard event files, written without either framework."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from allstep.common.recipe.progress import Progress
from allstep.common.reporting.base import CURVES, Reporter, output_dir_errors, scalars


class TensorBoard(Reporter):
    """Reporter that writes scalars per step to `steps/`, and scalars per epoch to `epochs/`."""

    def __init__(self, directory: Path, progress: Progress) -> None:
        """Open the event files, and let TensorBoard hide what an earlier run reported beyond `progress`."""
        # protobuf makes these classes when their modules are imported.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        self._event, self._summary = Event, Summary
        # Separate files, since TensorBoard hides points by their step, and an epoch's number is below its steps'.
        self._files = {name: _EventFile(directory / f"{name}s") for name in CURVES}
        for file in self._files.values():
            file.write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if progress.step:
            start = SessionLog(status=SessionLog.START)
            for name, completed in (("step", progress.step), ("epoch", progress.position.epoch)):
                self._files[name].write(Event(wall_time=time.time(), step=completed + 1, session_log=start))

    def event(self, name: str, **fields: Any) -> None:
        if name in CURVES:
            points = scalars(name, fields)
            values = [self._summary.Value(tag=curve, simple_value=value) for curve, value in points.items()]
            self._files[name].write(
                self._event(wall_time=time.time(), step=fields[name], summary=self._summary(value=values))
            )

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class _EventFile:
    """New event file in `directory`, each event complete before the next step begins.

    TensorBoard's EventFileWriter imports TensorFlow if that is installed, and writes in a thread, which prints a
    traceback if the disk is full.
    """

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._directory = directory
        with output_dir_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads the files of a directory in the order of their names.
            self._records = RecordWriter((directory / f"events.out.tfevents.{time.time_ns()}").open("wb"))

    def write(self, event: Any) -> None:
        with output_dir_errors(self._directory):
            self._records.write(event.SerializeToString())
            self._records.flush()

    def close(self) -> None:
        with output_dir_errors(self._directory):
            self._records.close()
