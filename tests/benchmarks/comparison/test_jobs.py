"""Launches that hang or fail."""

from __future__ import annotations

import shlex
import sys

from ranks import alive

from allstep.benchmarks.comparison.jobs import run_job


def test_a_hanging_launch_is_ended_with_all_that_it_started(tmp_path):
    """The grandchild is in a session of its own, as the ranks of mpirun are, and does not listen to SIGTERM."""
    script = (
        f"import os, signal, time; signal.signal(15, signal.SIG_IGN); os.setsid(); open({str(tmp_path / 'pid')!r}, "
    )
    script += "'w').write(str(os.getpid())); time.sleep(1000)"
    command = ["sh", "-c", f"{shlex.join([sys.executable, '-c', script])} & sleep 1000"]
    outcome = run_job([command], time_limit=2, num_threads=1)
    assert (outcome.status, outcome.reason) == ("timeout", "took longer than 2 s and was ended")
    assert not alive(int((tmp_path / "pid").read_text()))


def test_the_first_failure_ends_the_others_and_its_line_is_the_reason():
    told = "echo '[1,0]<stderr>:allstep: error: expected this, received that'; exit 2"
    outcome = run_job([["sh", "-c", told], ["sleep", "1000"]], time_limit=60, num_threads=1)
    assert (outcome.status, outcome.reason) == ("failed", "allstep: error: expected this, received that")
    assert run_job([["sh", "-c", "exit 3"]], time_limit=60, num_threads=1).reason == "ended with status 3"
