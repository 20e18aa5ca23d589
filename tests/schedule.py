"""The order of test files: the slowest first, so that the processes among which they are dealt out end together.

`seconds.json` has the seconds of each file. `pytest --write-seconds` writes those of the files that it has run.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

_FILE = Path(__file__).with_name("seconds.json")
_UNKNOWN = 30.0
"""Seconds of a file that is not listed; if it is slow, it had better be early."""
_seconds: Counter[str] = Counter()


def sort(items: list[pytest.Item]) -> None:
    """Sort tests by the seconds of their files; those of a file stay together, in their order."""
    known = json.loads(_FILE.read_text())
    files = list(dict.fromkeys(_file(item.nodeid) for item in items))
    order = {file: number for number, file in enumerate(sorted(files, key=lambda file: -known.get(file, _UNKNOWN)))}
    items.sort(key=lambda item: order[_file(item.nodeid)])


def note(report: pytest.TestReport) -> None:
    """Add the seconds of a setup, a call or a teardown to those of its file."""
    _seconds[_file(report.nodeid)] += report.duration


def write() -> None:
    """Write the seconds of the files that were run, and keep those of the others that exist."""
    known = json.loads(_FILE.read_text()) | {file: round(seconds, 1) for file, seconds in _seconds.items()}
    listed = {file: known[file] for file in sorted(known) if (_FILE.parent.parent / file).exists()}
    _FILE.write_text(json.dumps(listed, indent=1) + "\n")


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
