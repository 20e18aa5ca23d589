"""Interface through which a run reports its progress, a reporter that forwards to several, and the terminal's."""

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from allstep.common.base.errors import UserError, print_line
from allstep.common.base.progress_bar import ProgressBar
from allstep.common.files.disk import NO_ROOM, write_atomically


class Reporter:
    """Listener to a run; subclasses override the methods they need, the others do nothing."""

    def event(self, name: str, **fields: Any) -> None:
        """Handle `start`, `step`, `epoch` or `end`; docs/files.md lists their fields."""

    def progress(self, epoch: int, done: int, total: int) -> None:
        """Handle that `done` of `total` samples of an epoch are trained on; epochs count from 1."""

    def close(self) -> None:
        """Release files and the terminal."""


class Listeners(Reporter):
    """Reporter that forwards to any number of others, e.g. to none on all ranks but 0."""

    def __init__(self, reporters: Sequence[Reporter] = ()) -> None:
        self._reporters = reporters

    def event(self, name: str, **fields: Any) -> None:
        for reporter in self._reporters:
            reporter.event(name, **fields)

    def progress(self, epoch: int, done: int, total: int) -> None:
        for reporter in self._reporters:
            reporter.progress(epoch, done, total)

    def close(self) -> None:
        for reporter in self._reporters:
            reporter.close()


@contextmanager
def output_dir_errors(path: Path) -> Iterator[None]:
    """Turn an error of the file system into a UserError that names `path` and how to go on."""
    try:
        yield
    except OSError as error:
        advice = "make room" if error.errno in NO_ROOM else "move it elsewhere, or name another --output-dir"
        if error.errno == errno.EROFS:
            advice = "mount it for writing, or name another --output-dir"
        if not path.parent.exists():
            advice = "its folder was removed or renamed: name it by --output-dir as it is now, then --resume latest"
        elif any(any(folder.glob("checkpoints/step-*")) for folder in path.parents[:2]):
            advice = f"the checkpoints are unharmed: {advice}, then --resume latest"
        raise UserError(f"expected to write {path}, received the error: {error.strerror}; {advice}") from None


def write_whole(path: Path, text: str) -> None:
    """Replace the file at `path`, unchanged if that fails. Raises UserError if the disk is full or read-only."""
    with output_dir_errors(path), write_atomically(path) as stream:
        stream.write(text.encode())


CURVES = ("step", "epoch")
"""Events with a point of each curve. The field of the same name is its position on the x-axis."""
_FIELDS = {"step": ("learning_rate", "loss"), "epoch": ("train_loss", "images_per_second")}
_METRIC = "validation_"
"""Beginning of the fields of an epoch that are metrics."""
_NO_METRIC = "validation_samples"


def scalars(event: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """Return the points of an event by the names of their curves, such as `epoch/train_loss`."""
    return {f"{event}/{field}": value for field, value in fields.items() if _is_drawn(event, field, value)}


def _is_drawn(event: str, field: str, value: object) -> bool:
    if field in _FIELDS[event]:
        return True
    is_metric = event == "epoch" and field.startswith((_METRIC, f"ema_{_METRIC}")) and field != _NO_METRIC
    return is_metric and isinstance(value, (int, float))


class EpochLines(Reporter):
    """Reporter that prints the epoch line, whose format is fixed, after every epoch."""

    def event(self, name: str, **fields: Any) -> None:
        if name == "epoch":
            print_line(epoch_line(**fields) + first_metric(fields))


def epoch_line(
    *,
    epoch: int,
    cumulative_seconds: float,
    epoch_seconds: float,
    images_per_second: float,
    validation_loss: float,
    validation_accuracy: float | None = None,
    validation_mae: float | None = None,
    **_: Any,
) -> str:
    """Format the epoch line; times are in seconds. A run without classes has a mean absolute error, not an accuracy."""
    metric = f"MAE = {validation_mae:.3f}" if validation_accuracy is None else f"Accuracy = {validation_accuracy:.3f}"
    return (
        f"Epoch = {epoch:2d}: Cumulative Time = {cumulative_seconds:.3f}, Epoch Time = {epoch_seconds:.3f}, "
        f"Images/sec = {images_per_second:.1f}, Validation Loss = {validation_loss:.3f}, "
        f"Validation {metric}"
    )


def first_metric(fields: Mapping[str, Any]) -> str:
    """Return the end of the line: the first metric that is one number, unless the line has it already."""
    named = (name for name in fields if name.startswith("validation_") and name != "validation_loss")
    name = next((name for name in named if isinstance(fields[name], (int, float))), "validation_samples")
    if name in ("validation_accuracy", "validation_mae", "validation_samples"):
        return ""
    return f", Validation {name.removeprefix('validation_').replace('_', ' ').capitalize()} = {fields[name]:.3f}"


class EpochProgress(Reporter):
    """Progress bar of the run, for terminals; launchers pass standard error on unchanged."""

    def __init__(self, num_epochs: int) -> None:
        self._num_epochs = num_epochs
        self._bar: ProgressBar | None = None

    def progress(self, epoch: int, done: int, total: int) -> None:
        reached = epoch - 1 + done / total
        if self._bar is None:  # a resumed run begins in the middle
            self._bar = ProgressBar(self._num_epochs, done=reached).__enter__()
        self._bar.begin(f"epoch {epoch}/{self._num_epochs}")
        self._bar.reach(reached)

    def close(self) -> None:
        if self._bar:
            self._bar.close()
