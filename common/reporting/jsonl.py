"""metrics.jsonl: one JSON object a line, each with its `event`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from allstep.common.reporting.base import Reporter, output_dir_errors, write_whole


class JsonLines(Reporter):
    """Appends events to a file, each line complete before the next step begins."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with output_dir_errors(path):
            self._file = path.open("a", buffering=1, encoding="utf-8")

    def event(self, name: str, **fields: Any) -> None:
        with output_dir_errors(self._path):
            self._file.write(json.dumps({"event": name, **fields}, allow_nan=False) + "\n")

    def close(self) -> None:
        with output_dir_errors(self._path):  # what failed to be written is tried again here
            self._file.close()


def rewind(path: Path, *, step: int, epoch: int) -> None:
    """Cut metrics.jsonl back to a checkpoint, so that a resumed run tells nothing twice.

    What a killed run told after the checkpoint was saved goes; at step 0 everything goes.
    """
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            continue  # the line at which the run was killed
        told_after = event["event"] == "end" or event.get("step", 0) > step or event.get("epoch", 0) > epoch + 1
        if step and not told_after and not (event["event"] == "epoch" and event["epoch"] > epoch):
            kept.append(line + "\n")
    write_whole(path, "".join(kept))
