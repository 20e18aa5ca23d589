"""Mistakes of users, run as they would type them, for the corpus in `tests/mistakes`."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ranks import REPOSITORY, Result, environment, run_in

from allstep.commands import cli
from allstep.commands.shared import process_tree
from allstep.common.base.errors import UserError

PYTORCH = f"{sys.executable} {REPOSITORY}/pytorch/train.py"
TENSORFLOW = f"{sys.executable} {REPOSITORY}/tensorflow/train.py"
LAUNCHERS = ("horovodrun", "mpirun", "torchrun")
LIMIT_SECONDS = 60


@dataclass(frozen=True)
class Mistake:
    """A command that must end with status 2 and one line."""

    command: str
    """Command line; {here} is the folder in which it runs, empty except for files from `prepare`."""
    expected: str
    """Substring of the line's description of what was expected."""
    received: str
    """Substring of the line's description of what was received; {here} as in the command."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Environment variables in addition to those of an activated environment."""
    prepare: Callable[[Path], object] | None = None
    """Function that puts files into the folder."""


def check(mistake: Mistake, folder: Path) -> None:
    """Run the command of a mistake in `folder`, and check how it ends and what it leaves."""
    if mistake.prepare:
        mistake.prepare(folder)
    before = _listing(folder)
    mark = process_tree.new_mark()
    words = [word.replace("{here}", str(folder)) for word in shlex.split(mistake.command)]
    result = _run(words, folder, environment(**mistake.environ, **{process_tree.VARIABLE: mark}))
    survivors = process_tree.marked(mark)
    process_tree.kill(mark)
    assert result.returncode == 2, result.output
    assert "Traceback" not in result.output, result.output
    lines = [line for line in result.stderr.splitlines() if not line.startswith("make: ***")]
    # Launchers add lines about a rank that ends, unless they find the mistake themselves.
    if words[0] in LAUNCHERS and not any(line.startswith("horovodrun: expected ") for line in lines):
        lines = [line for line in result.output.splitlines() if "allstep: error: " in line]
    assert len(lines) == 1, result.output
    check_line(lines[0], mistake.expected, mistake.received.replace("{here}", str(folder)))
    assert not survivors, f"{len(survivors)} processes are left"
    assert _listing(folder) == before


def check_call(mistake: Mistake, folder: Path, monkeypatch: pytest.MonkeyPatch, output: Any) -> None:
    """Check a mistake of a command or a benchmark in this process, in what the process would call.

    Args:
        output: pytest's `capfd`.
    """
    if mistake.prepare:
        mistake.prepare(folder)
    before = _listing(folder)
    monkeypatch.chdir(folder)
    program, *words = [word.replace("{here}", str(folder)) for word in shlex.split(mistake.command)]
    call = cli.call if program == "allstep" else importlib.import_module(f"allstep.{program}").main
    with pytest.raises(UserError) as refused:
        call(words)
    line = str(refused.value)
    assert len(line.splitlines()) == 1
    check_line(line, mistake.expected, mistake.received.replace("{here}", str(folder)))
    assert output.readouterr() == ("", "")
    assert _listing(folder) == before


def check_line(line: str, expected: str, received: str) -> None:
    """Check that a line states what was expected and what was received."""
    message = re.fullmatch(r".*?expected (?P<expected>.+?),? (but )?received (?P<received>.+)", line)
    assert message, line
    assert expected in message["expected"], line
    assert received in message["received"], line


def _run(words: list[str], folder: Path, environ: dict[str, str]) -> Result:
    try:
        return run_in(folder, words, environ, timeout=LIMIT_SECONDS)
    except AssertionError:
        process_tree.kill(environ[process_tree.VARIABLE])
        raise


def _listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
