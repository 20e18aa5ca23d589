"""Watchdog of a suspended rank. tests/launch/test_elastic.py suspends one; here, one keeps the interpreter lock.

Oracle: what the process prints after its computation, and its exit status.
"""

from __future__ import annotations

import sys

import pytest
from ranks import run

PROGRAM = """
import ctypes, itertools, time
from allstep.common.process.suspend_watchdog import end_when_frozen

def count(number):  # without giving the lock to another thread
    return sum(itertools.repeat(1, number))

start = time.monotonic()
count(5 * 10**7)
in_four_seconds = int(2e8 / (time.monotonic() - start))
end_when_frozen(2)
{work}
print("done")
"""


@pytest.mark.parametrize(
    ("work", "status", "said"),
    [
        ("count(in_four_seconds)", 0, "done\n"),
        ("ctypes.PyDLL(None).sleep(60)", -9, ""),
    ],
)
def test_a_process_that_keeps_the_interpreter_lock_is_ended_only_if_it_does_nothing(work, status, said):
    result = run(sys.executable, "-c", PROGRAM.format(work=work))
    assert (result.returncode, result.stdout) == (status, said), result.output
    assert result.stderr.count("was frozen for 2 s, and is ended") == (status != 0)
