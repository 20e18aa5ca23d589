"""A slowed rank. Oracle: the process state that the kernel reports."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from ranks import alive

PROGRAM = "import time; from allstep.commands.study.slowed import slow_down; slow_down(); time.sleep(1000)"


def states(pid: int, wanted: str) -> bool:
    """Return whether the process reaches the state within half a minute."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == wanted:
            return True
    return False


def test_it_is_stopped_and_goes_on_until_it_ends():
    with subprocess.Popen([sys.executable, "-c", PROGRAM]) as process:
        try:
            found = [states(process.pid, state) for state in "TSTS"]  # stopped, and asleep when it runs
            [helper] = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        finally:
            process.kill()
    assert all(found)
    deadline = time.monotonic() + 60
    while alive(helper):
        assert time.monotonic() < deadline
