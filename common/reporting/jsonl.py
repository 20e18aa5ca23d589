"""metrics.jsonl: one JSON object per line, each with a field `event`."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allstep.common.base.errors import UserError, warn
from allstep.common.checkpoint.lock import LOCK, replaced
from allstep.common.files import strict_json
from allstep.common.files.disk import read_regular, regular, unused
from allstep.common.files.strict_json import Mismatch, NonNegative, Whole, from_json
from allstep.common.reporting.base import Reporter, output_dir_errors, write_whole


@dataclass(frozen=True)
class _Event:
    event: str
    step: Whole = 0
    epoch: NonNegative = 0


class JsonLines(Reporter):
    """Reporter that appends events to a file, each line complete before the next step begins.

    If the file is removed, renamed or replaced meanwhile, later events go to the file that has its name then.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, _status(path.with_name(LOCK))
        self._open()

    def event(self, name: str, **fields: Any) -> None:
        found = _status(self._path)
        if found is None or not os.path.samestat(found, os.fstat(self._file.fileno())):
            self._open_again()
        with output_dir_errors(self._path):
            self._file.write(json.dumps({"event": name, **fields}, allow_nan=False) + "\n")

    def close(self) -> None:
        with output_dir_errors(self._path):  # closing retries writes that failed before
            self._file.close()

    def _open(self) -> None:
        with output_dir_errors(self._path):
            self._file = open(self._path, "a", buffering=1, encoding="utf-8", opener=regular)  # noqa: SIM115

    def _open_again(self) -> None:
        lock = _status(self._path.with_name(LOCK))
        if lock and self._lock and not os.path.samestat(lock, self._lock):
            raise replaced(self._path.parent)
        self._file.close()
        self._open()
        warn(f"{self._path} was removed or renamed; later events go to a new file of that name")


def _status(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def rewind(path: Path, *, step: int, epoch: int) -> None:
    """Cut metrics.jsonl back to a checkpoint, so that a resumed run reports nothing twice.

    Events that a killed run reported after saving the checkpoint are removed, at step 0 all events. A file with lines
    that no run wrote is kept next to it. Raises UserError if the file is not from a run, or cannot be read or written.
    """
    if not os.path.lexists(path):
        return
    with output_dir_errors(path):
        *lines, last = read_regular(path, maximum=_LARGEST_FILE).split(b"\n")
    if not (last.startswith(_FIRST) or _FIRST.startswith(last)):  # else the run was killed while it wrote the line
        lines.append(last)
    kept, num_broken = [], 0
    for line in lines:
        try:
            event = strict_json.loads(line)
        except strict_json.NotJson:
            num_broken += 1
            continue
        try:
            found = from_json(_Event, event, "a line")
        except Mismatch as error:
            raise UserError(f"{path} is no run's: {error}; move it out of the output directory") from None
        reported_after = found.event == "end" or found.step > step or found.epoch > epoch + 1
        if step and not reported_after and not (found.event == "epoch" and found.epoch > epoch):
            kept.append(line + b"\n")
    if num_broken:
        _keep_beside(path, num_broken)
    write_whole(path, b"".join(kept).decode())


def _keep_beside(path: Path, num_broken: int) -> None:
    aside = unused(path.with_name(f"{path.name}.damaged"))
    with output_dir_errors(path):
        path.rename(aside)
    warn(f"{num_broken} line(s) of {path} are damaged and left out; the file as it was is kept in {aside}")


_FIRST = b'{"event": "'
_LARGEST_FILE = 2**30  # bytes: a line for each of several million steps
