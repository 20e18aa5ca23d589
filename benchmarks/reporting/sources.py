"""What a report is made of: everything that allstep's commands and trainers leave in the directories named.

A file that cannot be read, or is of another version, becomes a problem in one line, and the rest goes on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allstep.benchmarks.comparison import results
from allstep.benchmarks.comparison.shapes import END, EPOCH, REPORTED, START
from allstep.common.files import strict_json
from allstep.common.files.regular_file import read_regular
from allstep.common.files.schema import Mismatch, list_of, one_of, record, text
from allstep.common.files.strict_json import NotJson

_LARGEST_LOG = 64 * 2**20  # bytes of metrics.jsonl: a line for each of half a million steps
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY", re.IGNORECASE)
_SECRETS = (
    (re.compile(r"(//)[^/\s@]+@"), r"\1(hidden)@"),
    (re.compile(rf"(?i)\b([\w-]*(?:{_SECRET_NAME.pattern})[\w-]*[= ])\S+"), r"\1(hidden)"),
)


@dataclass
class Sources:
    """What was found, each with the path where it was, relative to the directory that was named."""

    compares: list[tuple[Path, dict[str, Any]]] = field(default_factory=list)
    collectives: list[tuple[Path, dict[str, Any]]] = field(default_factory=list)
    forecasts: list[tuple[Path, dict[str, Any]]] = field(default_factory=list)
    validations: list[tuple[Path, dict[str, Any]]] = field(default_factory=list)
    benchmarks: list[tuple[Path, dict[str, Any]]] = field(default_factory=list)
    """What `benchmarks.measure.save` wrote."""
    runs: list[tuple[Path, RecordedRun]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """One line each."""

    def __len__(self) -> int:
        of_commands = (self.compares, self.collectives, self.forecasts, self.validations)
        return sum(map(len, (*of_commands, self.benchmarks, self.runs)))


@dataclass(frozen=True)
class RecordedRun:
    """A training run's metrics.jsonl."""

    start: dict[str, Any]
    epochs: list[dict[str, Any]]
    end: dict[str, Any] | None
    """None for a run that has not ended, or was killed."""
    config: Path | None
    """Its config.yaml; None where that is gone."""


def read(directories: Iterable[Path]) -> Sources:
    """Read directories, and the directories in them."""
    found = Sources()
    for directory in directories:
        if not directory.is_dir():
            found.problems.append(f"{directory}: no such directory")
            continue
        before = len(found) + len(found.problems)
        for path in sorted(directory.rglob("*.json")):
            if not {"samples", "gates", "checkpoints"} & set(path.relative_to(directory).parts[:-1]):
                _guarded(found, path, _read_json)
        for path in sorted(directory.rglob("metrics.jsonl")):
            _guarded(found, path, _read_run)
        if len(found) + len(found.problems) == before:
            found.problems.append(f"{directory}: no results of allstep in it")
    return found


def _guarded(found: Sources, path: Path, reader: Callable[[Sources, Path], None]) -> None:
    try:
        reader(found, path)
    except OSError as error:
        found.problems.append(f"{path}: not readable as a result: {error.strerror}")
    except (NotJson, Mismatch) as error:
        found.problems.append(f"{path}: not readable as a result: {error}")


def _read_json(found: Sources, path: Path) -> None:
    content = redact(results.load(path))
    if not isinstance(content, dict):
        return
    kind = content.get("format")
    if isinstance(kind, str) and kind in results.VERSIONS:
        one_of(results.VERSIONS[kind])(content.get("version"), f"the version of {kind}")
        REPORTED[kind](content, "result")
        lists = {
            "allstep-compare": found.compares,
            "allstep-collectives": found.collectives,
            "allstep-predict": found.forecasts,
            "allstep-validation": found.validations,
            results.BENCHMARK: found.benchmarks,
        }
        lists[kind].append((path, content))


def _read_run(found: Sources, path: Path) -> None:
    events = []
    for line in read_regular(path, most=_LARGEST_LOG).splitlines():
        try:
            events.append(redact(strict_json.loads(line)))
        except NotJson:
            found.problems.append(f"{path}: a line is half-written and was left out")
    list_of(record(event=text))(events, "events")
    starts, epochs, ends = ([event for event in events if event["event"] == name] for name in ("start", "epoch", "end"))
    if not starts:
        raise Mismatch("expected a start event, received none")
    START(starts[-1], "start")
    for epoch in epochs:
        EPOCH(epoch, "epoch")
    for end in ends:
        END(end, "end")
    config = path.with_name("config.yaml")
    run = RecordedRun(starts[-1], epochs, ends[-1] if ends else None, config if config.exists() else None)
    found.runs.append((path.parent, run))


def redact(value: Any, name: str = "") -> Any:
    """The same value with passwords in addresses, and whatever bears a secret's name, hidden."""
    if isinstance(value, dict):
        return {key: redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [redact(item) for item in value]
    if isinstance(value, str):
        if _SECRET_NAME.search(name):
            return "(hidden)"
        for pattern, replacement in _SECRETS:
            value = pattern.sub(replacement, value)
    return value
