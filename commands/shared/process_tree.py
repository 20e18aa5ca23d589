"""Find and end the processes that a launch has started on this host.

Launchers put ranks into sessions of their own, where signals to a process group do not reach them. But a process
inherits the environment of its parent, so an environment variable marks them all.
"""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

VARIABLE = "ALLSTEP_JOB"
POLL_SECONDS = 0.05


def new_mark() -> str:
    """Return a value of VARIABLE that is unique on this host."""
    return uuid.uuid4().hex


def marked(mark: str) -> list[int]:
    """Return the ids of the processes whose environment has the mark; ended processes have no environment."""
    text, found = f"{VARIABLE}={mark}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # the process has ended, or is another user's
            if text in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def kill(mark: str) -> None:
    """Kill all processes that have the mark, and those that they start meanwhile."""
    while left := marked(mark):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def guard(mark: str) -> None:
    """Have all processes with the mark killed when this process ends, even by SIGKILL."""
    marks = _guardian().stdin
    assert marks is not None
    marks.write(f"{mark}\n")
    marks.flush()


@functools.cache
def _guardian() -> subprocess.Popen[str]:
    program = (sys.executable, "-m", "allstep.commands.shared.process_tree")
    environ = {name: value for name, value in os.environ.items() if name != VARIABLE}  # it outlives a marked process
    return subprocess.Popen(program, stdin=subprocess.PIPE, text=True, start_new_session=True, env=environ)


if __name__ == "__main__":  # the guardian: its input ends when its parent does
    for mark in sys.stdin.read().split():
        kill(mark)
