"""Start real ranks by real launchers, as a user does, and collect their output."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import warm_start

from allstep.commands.shared.jobs import LAUNCHERS as LAUNCHER_COMMANDS

REPOSITORY = Path(__file__).resolve().parent.parent
BIN = Path(sys.prefix) / "bin"


def full(*values: object) -> object:
    """Return a case of `pytest.mark.parametrize` that runs only with `pytest -m full`."""
    return pytest.param(*values, marks=pytest.mark.full)


@dataclass(frozen=True)
class Result:
    """Exit status and output of a job."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def environment(**extra: str) -> dict[str, str]:
    """Return a user's variables in the activated virtual environment, with one thread per rank."""
    return {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": sys.prefix,
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **warm_start.variables(),
        **extra,
    }


def run(*command: str | Path, timeout: float = 300, **extra: str) -> Result:
    """Run a command in the repository; kill everything it started when it exceeds `timeout` seconds."""
    return run_in(REPOSITORY, [str(part) for part in command], environment(**extra), timeout=timeout)


def run_in(folder: Path, command: Sequence[str], environ: Mapping[str, str], *, timeout: float) -> Result:
    """Run a command in a folder with an environment; kill its process group when it exceeds `timeout` seconds."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environ,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        raise AssertionError(f"{command} did not end in {timeout} s\n{stdout}\n{stderr}") from None
    return Result(process.returncode, stdout, stderr)


LAUNCHERS = {
    name: LAUNCHER_COMMANDS[name][: LAUNCHER_COMMANDS[name].index("{ranks}")]
    for name in ("horovodrun-mpi", "horovodrun-gloo", "mpirun")
}
"""Command that starts ranks, followed by their number and `python`."""


def launch(launcher: str, num_ranks: int, *command: str | Path, **extra: str) -> Result:
    """Run `python COMMAND` on local ranks under one of `LAUNCHERS`, or without a launcher for "alone"."""
    start = () if launcher == "alone" else (*LAUNCHERS[launcher], num_ranks)
    return run(*start, sys.executable, *command, **extra)


def train(
    framework: str, launcher: str, num_ranks: int, output_dir: Path, *flags: str | int | float, **extra: str
) -> list[dict]:
    """Train and return the events of metrics.jsonl; the job must succeed."""
    result = launch(launcher, num_ranks, f"{framework}/train.py", "--output-dir", output_dir, *map(str, flags), **extra)
    assert result.returncode == 0, result.output
    return events(output_dir)


def events(output_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def last(events: list[dict], name: str) -> dict:
    return [event for event in events if event["event"] == name][-1]


def free_port() -> int:
    """Return a port where no process listens, for a command that takes one as argument.

    It is below those that the kernel assigns, so that it stays free until it is used.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


def alive(pid: int) -> bool:
    """Return whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
