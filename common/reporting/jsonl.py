"""metrics.jsonl: one JSON object per line, each with a field `event`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from allstep.common.base.errors import UserError
from allstep.common.files import strict_json
from allstep.common.files.regular_file import read_regular, regular
from allstep.common.files.schema import Mismatch, number, record, text, whole
from allstep.common.reporting.base import Reporter, output_dir_errors, write_whole


class JsonLines(Reporter):
    """Reporter that appends events to a file, each line complete before the next step begins."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with output_dir_errors(path):
            self._file = open(path, "a", buffering=1, encoding="utf-8", opener=regular)  # noqa: SIM115

    def event(self, name: str, **fields: Any) -> None:
        with output_dir_errors(self._path):
            self._file.write(json.dumps({"event": name, **fields}, allow_nan=False) + "\n")

    def close(self) -> None:
        with output_dir_errors(self._path):  # closing retries writes that failed before
            self._file.close()


def rewind(path: Path, *, step: int, epoch: int) -> None:
    """Cut metrics.jsonl back to a checkpoint, so that a resumed run reports nothing twice.

    Events that a killed run reported after saving the checkpoint are removed; at step 0 all events are removed.

    Raises:
        UserError: the file is not from a run, or cannot be read or written.
    """
    if not path.exists():
        return
    with output_dir_errors(path):
        lines = read_regular(path, maximum=_LARGEST_FILE).decode(errors="replace").splitlines()
    kept = []
    for line in lines:
        try:
            event = strict_json.loads(line.encode())
        except strict_json.NotJson:
            continue  # a partial line of a killed run
        try:
            _EVENT(event, "a line")
        except Mismatch as error:
            raise UserError(f"{path} is no run's: {error}; move it out of the output directory") from None
        reported_after = event["event"] == "end" or event.get("step", 0) > step or event.get("epoch", 0) > epoch + 1
        if step and not reported_after and not (event["event"] == "epoch" and event.get("epoch", 0) > epoch):
            kept.append(line + "\n")
    write_whole(path, "".join(kept))


_EVENT = record({"step": whole(), "epoch": number(0)}, event=text)
_LARGEST_FILE = 2**30  # bytes: a line for each of several million steps
