"""metrics.jsonl: one JSON object a line, each with its `event`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from allstep.common.reporting.base import Reporter


class JsonLines(Reporter):
    """Appends events to a file, each line complete before the next step begins."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def event(self, name: str, **fields: Any) -> None:
        self._file.write(json.dumps({"event": name, **fields}, allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()
