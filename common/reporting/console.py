"""Output of a run on the terminal: one line per epoch and, if standard error is a terminal, a progress bar."""

from collections.abc import Mapping
from typing import Any

from allstep.common.base.progress_bar import ProgressBar
from allstep.common.base.terminal import print_line
from allstep.common.reporting.base import Reporter


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
