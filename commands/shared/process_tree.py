"""Find and end what a launch has started on this host.

Launchers put ranks into sessions of their own, which no signal to a group reaches; but whatever a process starts
inherits its environment, and so a variable of it marks them all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

VARIABLE = "ALLSTEP_JOB"
POLL_SECONDS = 0.05
# For a launcher to end the ranks on other hosts, which nobody else here can.
_GRACE_SECONDS = 5.0


def new_mark() -> str:
    """A value of VARIABLE that nothing else on this host has."""
    return uuid.uuid4().hex


def marked(mark: str) -> list[int]:
    """Ids of the processes whose environment has the mark; one that has ended has no environment."""
    text, found = f"{VARIABLE}={mark}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is somebody else's
            if text in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def kill(mark: str) -> None:
    """Kill all that have the mark, and what they start meanwhile."""
    while left := marked(mark):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def guardian() -> Iterator[Callable[[str], None]]:
    """What it is given, the marks of jobs, does not outlive this process, even if that is killed."""
    program = (sys.executable, "-m", "allstep.commands.shared.process_tree")
    with subprocess.Popen(program, stdin=subprocess.PIPE, text=True, start_new_session=True) as process:
        marks = process.stdin
        assert marks is not None

        def guard(mark: str) -> None:
            marks.write(f"{mark}\n")
            marks.flush()

        yield guard


def ask_to_end(processes: Sequence[subprocess.Popen]) -> float:
    """Ask launches to end, with what they have started; returns their deadline, by the monotonic clock."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    return time.monotonic() + _GRACE_SECONDS


def end(processes: Sequence[subprocess.Popen], mark: str, *, deadline: float) -> None:
    """End all that launches have started and that does not end by itself until the deadline: they have been asked."""
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(POLL_SECONDS)
    kill(mark)
    for process in processes:
        process.wait()


if __name__ == "__main__":  # the guardian: its input ends when whoever started it does
    for mark in sys.stdin.read().split():
        kill(mark)
