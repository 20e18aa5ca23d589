"""Sources of a report: the results of allstep's commands and trainers in the given directories.

A file that cannot be read, or is of another version, becomes a problem of one line, and the others are still read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allstep.commands.compare.records import ComparisonResult
from allstep.commands.forecast.section import ForecastsResult, ValidationResult
from allstep.commands.shared.records import files
from allstep.commands.shared.records.collectives import CollectivesResult
from allstep.commands.shared.records.measured import BenchmarkResult
from allstep.commands.shared.records.runs import FILE, End, Epoch, ProfileResult, Start, read_events
from allstep.commands.study.description import SUMMARY, StudyResult
from allstep.commands.tune.study import SearchResult
from allstep.common.files.strict_json import Mismatch, NotJson, from_json

_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY", re.IGNORECASE)
_SECRETS = (
    (re.compile(r"(//)[^/\s@]+@"), r"\1(hidden)@"),
    (re.compile(rf"(?i)\b([\w-]*(?:{_SECRET_NAME.pattern})[\w-]*[= ])\S+"), r"\1(hidden)"),
)


@dataclass(frozen=True)
class RecordedRun:
    """A training run's metrics.jsonl."""

    start: Start
    epochs: tuple[Epoch, ...]
    end: End | None
    """None if the run has not ended or was killed."""
    config: Path | None
    """Path of its config.yaml; None if the file is missing."""


_FILES = (
    *(ComparisonResult, CollectivesResult, ForecastsResult, ValidationResult, BenchmarkResult),
    *(StudyResult, SearchResult, ProfileResult),
)
"""Kinds of results that are a JSON file each."""
KINDS = (*_FILES, RecordedRun)


@dataclass
class Sources:
    """Results that were found, each with its path."""

    results: dict[type, list[tuple[Path, Any]]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    """Paths and results by kind; of training runs, `RecordedRun` and the path of the directory."""
    problems: list[str] = field(default_factory=list)
    """Problems in one line each."""

    def __len__(self) -> int:
        return sum(map(len, self.results.values()))


def read(directories: Iterable[Path]) -> Sources:
    """Read the results in directories and their subdirectories."""
    found = Sources()
    for directory in directories:
        if not directory.is_dir():
            what = "a file, not a directory" if directory.exists() else "no such directory"
            found.problems.append(f"{directory}: {what}")
            continue
        before = len(found) + len(found.problems)
        paths = _files_below(found, directory)
        for path in paths:
            is_of_run = {"samples", "gates", "checkpoints"} & set(path.relative_to(directory).parts[:-1])
            if path.suffix == ".json" and not is_of_run:
                _guarded(found, path, _read_json)
        # Runs of a study are in the study's section.
        for path in paths:
            if path.name == FILE and not (path.parents[1].parent / SUMMARY).exists():
                _guarded(found, path, _read_run)
        if len(found) + len(found.problems) == before:
            found.problems.append(f"{directory}: no results of allstep in it")
    return found


def _files_below(found: Sources, directory: Path) -> list[Path]:
    """Return the files in a directory and its subdirectories; those that cannot be listed become problems."""

    def note(error: OSError) -> None:
        found.problems.append(f"{error.filename}: not readable: {error.strerror}")

    return sorted(Path(folder, name) for folder, _, names in os.walk(directory, onerror=note) for name in names)


def _guarded(found: Sources, path: Path, reader: Callable[[Sources, Path], None]) -> None:
    try:
        reader(found, path)
    except OSError as error:
        found.problems.append(f"{path}: not readable as a result: {error.strerror}")
    except (NotJson, files.OtherFormat, Mismatch) as error:
        found.problems.append(f"{path}: not readable as a result: {error}")


def _read_json(found: Sources, path: Path) -> None:
    content = redact(files.load(path))
    for kind in _FILES:
        if isinstance(content, dict) and content.get("format") in files.formats(kind):
            files.check_version(kind, content)
            found.results[kind].append((path, from_json(kind, content, "result")))


def _read_run(found: Sources, path: Path) -> None:
    events = read_events(path, redact)
    found.problems += [f"{path}: a line is half-written and was left out"] * events.num_broken
    if not events.starts:
        raise Mismatch("expected a start event, received none")
    config = path.with_name("config.yaml")
    end = events.ends[-1] if events.ends else None
    run = RecordedRun(events.starts[-1], events.epochs, end, config if config.exists() else None)
    found.results[RecordedRun].append((path.parent, run))


def redact(value: Any, name: str = "") -> Any:
    """Return the value with passwords in addresses, and values named like a secret, hidden."""
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
