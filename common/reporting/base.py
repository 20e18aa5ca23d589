"""The one interface through which a run reports what it does, and the way to have several listeners."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from allstep.common.base.errors import UserError
from allstep.common.files.disk import write_atomically


class Reporter:
    """A listener to a run. It hears everything and does nothing where a subclass does not override it."""

    def event(self, name: str, **fields: Any) -> None:
        """Take note of `start`, `step`, `epoch` or `end`; README.md lists their fields."""

    def progress(self, epoch: int, done: int, total: int) -> None:
        """Take note that `done` of `total` samples of the epoch, counted from 1, are trained on."""

    def close(self) -> None:
        """Let go of files and the terminal."""


class Listeners(Reporter):
    """Passes everything on to several reporters; without any, as on all ranks but 0, it is silent."""

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
    """Turns an error of the disk (full, read-only, forbidden) into a line that names `path` and how to go on."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"expected to write {path}, received the error: {error.strerror}; the checkpoints are unharmed: make room, "
            "then --resume latest"
        ) from None


def write_whole(path: Path, text: str) -> None:
    """Put a file in the place of `path`, which stays as it is where that fails.

    Raises:
        UserError: the disk is full, or cannot be written.
    """
    with output_dir_errors(path), write_atomically(path) as stream:
        stream.write(text.encode())
