"""Run launches with a limit of time; at the end nothing that they started is left."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Literal

from allstep.benchmarks import marked
from allstep.benchmarks.measure import environment

_NUM_LOG_LINES = 30

Status = Literal["ok", "failed", "timeout"]


@dataclass(frozen=True)
class Outcome:
    """How a launch ended."""

    status: Status
    reason: str | None
    """One line where it is not ok."""
    launched_at: float
    """Unix time."""
    seconds: float
    """That it ran, without those in which it waited for its turn."""
    log: str | None
    """The last lines of output where it is not ok."""


class Job:
    """Commands that have been started at the same time."""

    def __init__(self, commands: Sequence[Sequence[str]], output: IO[bytes], *, num_threads: int) -> None:
        """Start them; what they print goes to `output`. Each rank has `num_threads` compute threads."""
        self.mark = marked.new_mark()
        self.launched_at = time.time()
        self._output = output
        self._processes: list[subprocess.Popen] = []
        self._deadline: float | None = None  # not asked to end yet
        started_with = {**environment(), "OMP_NUM_THREADS": str(num_threads), marked.VARIABLE: self.mark}
        try:
            for command in commands:
                self._processes.append(
                    subprocess.Popen(
                        command,
                        env=started_with,
                        stdin=subprocess.DEVNULL,
                        stdout=self._output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        except BaseException:
            self.end()
            raise

    def result(self) -> tuple[Status, str | None] | None:
        """Status and reason where all commands have ended, or one has failed; None while they run."""
        codes = [process.poll() for process in self._processes]
        if failed := [code for code in codes if code]:
            return "failed", f"ended with status {failed[0]}"
        return None if None in codes else ("ok", None)

    def ask_to_end(self) -> None:
        """Tell what still runs to end; once, for a launcher that is told twice no longer ends its ranks in order."""
        if self._deadline is None:
            self._deadline = marked.ask_to_end(self._processes)

    def end(self) -> None:
        """End what still runs, with every process that it has started."""
        self.ask_to_end()
        marked.end(self._processes, self.mark, deadline=self._deadline)

    def outcome(self, status: Status, reason: str | None, seconds: float) -> Outcome:
        """How it ended, when it has."""
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").splitlines()
        if status == "failed":
            reason = _told(lines) or reason
        log = None if status == "ok" else "\n".join(lines[-_NUM_LOG_LINES:])
        return Outcome(status, reason, self.launched_at, seconds, log)


def timed_out(time_limit: float) -> tuple[Status, str]:
    """Status and reason of a job that was ended at its limit."""
    return "timeout", f"took longer than {time_limit:g} s and was ended"


def run_job(commands: Sequence[Sequence[str]], *, time_limit: float, num_threads: int) -> Outcome:
    """Run commands at the same time to their ends; the first that fails ends the others.

    Args:
        time_limit: seconds after which all are ended, with every process that they started.
        num_threads: compute threads of each rank.
    """
    with tempfile.TemporaryFile() as output:
        started = time.perf_counter()
        job = Job(commands, output, num_threads=num_threads)
        try:
            while (result := job.result()) is None and time.perf_counter() - started < time_limit:
                time.sleep(marked.POLL_SECONDS)
            seconds = time.perf_counter() - started
        finally:
            job.end()
        return job.outcome(*(result or timed_out(time_limit)), seconds)


def _told(lines: Sequence[str]) -> str | None:
    """What the trainer said was the cause, without what launchers put in front of a line."""
    told = [line[line.index("allstep: ") :] for line in lines if "allstep: " in line and "warning" not in line]
    return told[0] if told else None
