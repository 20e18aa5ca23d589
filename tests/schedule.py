"""The order of test files: the slowest first, so that the processes among which they are dealt out end together.

`seconds.json` has the seconds of each file, and the tests that start no process and yet take a quarter of a second
or more, which get the mark `slow`. `pytest --write-seconds` writes both for the files that it has run.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

_FILE = Path(__file__).with_name("seconds.json")
_UNKNOWN = 30.0
"""Seconds of a file that is not listed; if it is slow, it had better be early."""
_SLOW = 0.25
_seconds: Counter[str] = Counter()
"""Seconds of each file."""
_of_tests: Counter[str] = Counter()
"""Seconds of each test that starts no process."""


class FileScheduler(LoadFileScheduling):
    """Deals out files to workers; when one crashes, only what it has not finished goes to the others.

    That of xdist deals out its finished files again. A worker that gets nothing else never asks for more, so that all
    workers wait for ever.
    """

    def remove_node(self, node) -> str | None:
        files = self.assigned_work[node]
        self.assigned_work[node] = {file: tests for file, tests in files.items() if not all(tests.values())}
        return super().remove_node(node)


def sort(items: list[pytest.Item]) -> None:
    """Sort tests by the seconds of their files; those of a file stay together, in their order."""
    known = json.loads(_FILE.read_text())["files"]
    files = list(dict.fromkeys(_file(item.nodeid) for item in items))
    order = {file: number for number, file in enumerate(sorted(files, key=lambda file: -known.get(file, _UNKNOWN)))}
    items.sort(key=lambda item: order[_file(item.nodeid)])


def mark(items: list[pytest.Item]) -> None:
    """Give the mark `slow` to the tests that were."""
    slow = set(json.loads(_FILE.read_text())["slow"])
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)


def note(report: pytest.TestReport) -> None:
    """Add the seconds of a setup, a call or a teardown to those of its file and its test."""
    _seconds[_file(report.nodeid)] += report.duration
    if "launch" not in report.keywords:
        _of_tests[report.nodeid] += report.duration


def write() -> None:
    """Write the seconds of the files that were run and their slow tests, and keep those of the others that exist."""
    known = json.loads(_FILE.read_text())
    files = known["files"] | {file: round(seconds, 1) for file, seconds in _seconds.items()}
    slow = [test for test in known["slow"] if _file(test) not in _seconds]
    slow += [test for test, seconds in _of_tests.items() if seconds >= _SLOW]
    exist = {file for file in files if (_FILE.parent.parent / file).exists()}
    listed = {
        "files": {file: files[file] for file in sorted(exist)},
        "slow": sorted(test for test in slow if _file(test) in exist),
    }
    _FILE.write_text(json.dumps(listed, indent=1) + "\n")


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
