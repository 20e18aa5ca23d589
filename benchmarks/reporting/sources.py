"""What a report is made of: everything that allstep's commands and trainers leave in the directories named.

A file that cannot be read, or is of another version, becomes a problem in one line, and the rest goes on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allstep.benchmarks.comparison.results import BENCHMARK, VERSIONS

_LARGEST_FILE = 64 * 2**20
_LARGEST_NUMBER = 1e30  # what is drawn and printed is far below
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
    runs: list[tuple[Path, Run]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """One line each."""

    def __len__(self) -> int:
        of_commands = (self.compares, self.collectives, self.forecasts, self.validations)
        return sum(map(len, (*of_commands, self.benchmarks, self.runs)))


@dataclass(frozen=True)
class Run:
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
        if path.stat().st_size > _LARGEST_FILE:
            raise ValueError(f"larger than {_LARGEST_FILE // 2**20} MiB")
        reader(found, path)
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error)
        found.problems.append(f"{path}: not readable as a result: {' '.join(reason.split())}")


def _read_json(found: Sources, path: Path) -> None:
    content = without_secrets(json.loads(path.read_text(encoding="utf-8")))
    if not isinstance(content, dict):
        return
    kind = content.get("format")
    if isinstance(kind, str) and kind in VERSIONS:
        if content.get("version") != VERSIONS[kind]:
            received = content.get("version")
            raise ValueError(f"{kind} of version {received}, and this allstep reads version {VERSIONS[kind]}")
        lists = {
            "allstep-compare": found.compares,
            "allstep-collectives": found.collectives,
            "allstep-predict": found.forecasts,
            "allstep-validation": found.validations,
            BENCHMARK: found.benchmarks,
        }
        if kind == BENCHMARK:
            _require(content, "figures", "samples")
            if not isinstance(content["figures"], list):
                raise ValueError("has no list of figures")
            for figure in content["figures"]:
                _require(figure, "what", "target", "reached")
                _require_numbers(figure, "ours", "reference", "ratio")
        lists[kind].append((path, content))


def _read_run(found: Sources, path: Path) -> None:
    events = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            events.append(without_secrets(json.loads(line)))
        except ValueError:
            found.problems.append(f"{path}: a line is half-written and was left out")
    if not all(isinstance(event, dict) for event in events):
        raise ValueError("a line that is no event")
    starts, epochs, ends = (
        [event for event in events if event.get("event") == name] for name in ("start", "epoch", "end")
    )
    if not starts:
        raise ValueError("no start event")
    _require(starts[-1], "framework", "strategy")
    _require_numbers(starts[-1], "world_size", "global_batch_size")
    for epoch in epochs:
        _require_numbers(epoch, "epoch", "train_loss", "validation_accuracy", "cumulative_seconds")
        _allow_numbers(epoch, "images_per_second")
    for end in ends:
        _allow_numbers(end, "peak_memory_bytes")
    config = path.with_name("config.yaml")
    run = Run(starts[-1], epochs, ends[-1] if ends else None, config if config.exists() else None)
    found.runs.append((path.parent, run))


def _require(mapping: dict[str, Any], *names: str) -> None:
    if not isinstance(mapping, dict):
        raise ValueError(f"expected {', '.join(names)}, received {type(mapping).__name__}")
    if missing := [name for name in names if name not in mapping]:
        raise ValueError(f"lacks {', '.join(missing)}")


def _require_numbers(mapping: dict[str, Any], *names: str) -> None:
    _require(mapping, *names)
    if wrong := [name for name in names if not _is_number(mapping[name])]:
        raise ValueError(f"has no number in {', '.join(wrong)}")


def _allow_numbers(mapping: dict[str, Any], *names: str) -> None:
    """What need not be there is a number where it is."""
    _require_numbers(mapping, *(name for name in names if mapping.get(name) is not None))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and abs(value) < _LARGEST_NUMBER  # which nan is not


def without_secrets(value: Any, name: str = "") -> Any:
    """The same value with passwords in addresses, and whatever bears a secret's name, hidden."""
    if isinstance(value, dict):
        return {key: without_secrets(item, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    if isinstance(value, str):
        if _SECRET_NAME.search(name):
            return "(hidden)"
        for pattern, replacement in _SECRETS:
            value = pattern.sub(replacement, value)
    return value
