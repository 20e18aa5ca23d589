"""Interface through which a run reports its progress, and a reporter that forwards to several others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from allstep.common.base.errors import UserError
from allstep.common.files.disk import write_atomically


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
    """Turn an error of the disk (full, read-only, forbidden) into a UserError that names `path` and how to resume."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"expected to write {path}, received the error: {error.strerror}; the checkpoints are unharmed: make room, "
            "then --resume latest"
        ) from None


def write_whole(path: Path, text: str) -> None:
    """Replace the file at `path`, which stays unchanged if that fails.

    Raises:
        UserError: the disk is full, or cannot be written.
    """
    with output_dir_errors(path), write_atomically(path) as stream:
        stream.write(text.encode())
