"""Start real ranks by real launchers, as a user does, and collect what they say."""

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

from allstep.benchmarks.harness.launchers import LAUNCHERS as LAUNCHER_COMMANDS

REPOSITORY = Path(__file__).resolve().parent.parent
BIN = Path(sys.prefix) / "bin"


def full(*values: object) -> object:
    """A case of `pytest.mark.parametrize` that runs where pytest is told `-m full` alone."""
    return pytest.param(*values, marks=pytest.mark.full)


@dataclass(frozen=True)
class Result:
    """How a job ended."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def environment(**extra: str) -> dict[str, str]:
    """The environment of a user who activated the virtual environment; one thread a rank."""
    return {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": sys.prefix,
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **extra,
    }


def run(*command: str | Path, timeout: float = 300, **extra: str) -> Result:
    """Run a command in the repository; everything it started is gone when it exceeds `timeout` seconds."""
    return run_in(REPOSITORY, [str(part) for part in command], environment(**extra), timeout=timeout)


def run_in(folder: Path, command: Sequence[str], environ: Mapping[str, str], *, timeout: float) -> Result:
    """Run a command in a folder with an environment; its process group is gone when it exceeds `timeout` seconds."""
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
"""What starts ranks up to their number, after which `python` follows."""


def launch(launcher: str, num_ranks: int, *command: str | Path, **extra: str) -> Result:
    """Run `python COMMAND` on local ranks under one of `LAUNCHERS`, or alone for "alone"."""
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
    """A port where nobody listens, for a command that is told of one.

    It is below those that the kernel gives to whoever asks for any port, so that it stays free until it is used.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


def alive(pid: int) -> bool:
    """Whether the process runs, and is not one that has ended and is not waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
