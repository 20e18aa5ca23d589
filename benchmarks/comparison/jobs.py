"""Run launches with a limit of time; at the end nothing that they started is left."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from allstep.benchmarks import marked
from allstep.benchmarks.measure import environment

_NUM_LOG_LINES = 30


@dataclass(frozen=True)
class Outcome:
    """How a launch ended."""

    status: Literal["ok", "failed", "timeout"]
    reason: str | None
    """One line where it is not ok."""
    launched_at: float
    """Unix time."""
    seconds: float
    log: str | None
    """The last lines of output where it is not ok."""


def run_job(commands: Sequence[Sequence[str]], *, time_limit: float, num_threads: int) -> Outcome:
    """Run commands at the same time to their ends; the first that fails ends the others.

    Args:
        time_limit: seconds after which all are ended, with every process that they started.
        num_threads: compute threads of each rank.
    """
    mark = marked.new_mark()
    started_with = {**environment(), "OMP_NUM_THREADS": str(num_threads), marked.VARIABLE: mark}
    with tempfile.TemporaryFile() as output:
        launched_at, started = time.time(), time.perf_counter()
        processes: list[subprocess.Popen] = []
        try:
            for command in commands:
                processes.append(
                    subprocess.Popen(
                        command,
                        env=started_with,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
            status, reason = _wait(processes, time_limit)
        finally:
            seconds = time.perf_counter() - started
            marked.end(processes, mark)
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    if status == "failed":
        reason = _told(lines) or reason
    log = None if status == "ok" else "\n".join(lines[-_NUM_LOG_LINES:])
    return Outcome(status, reason, launched_at, seconds, log)


def _wait(processes: Sequence[subprocess.Popen], time_limit: float) -> tuple[str, str | None]:
    deadline = time.monotonic() + time_limit
    while True:
        codes = [process.poll() for process in processes]
        if failed := [code for code in codes if code]:
            return "failed", f"ended with status {failed[0]}"
        if None not in codes:
            return "ok", None
        if time.monotonic() > deadline:
            return "timeout", f"took longer than {time_limit:g} s and was ended"
        time.sleep(marked.POLL_SECONDS)


def _told(lines: Sequence[str]) -> str | None:
    """What the trainer said was the cause, without what launchers put in front of a line."""
    told = [line[line.index("allstep: ") :] for line in lines if "allstep: " in line and "warning" not in line]
    return told[0] if told else None
