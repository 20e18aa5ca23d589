"""Launches that hang or fail."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time

import pytest
from ranks import alive

from allstep.commands.shared.jobs import run_job, run_jobs, running


def test_a_hanging_launch_is_ended_with_all_that_it_started(tmp_path):
    """The grandchild has its own session, as ranks of mpirun have, and ignores SIGTERM."""
    script = f"trap '' TERM; echo $$ >{tmp_path}/pid; exec sleep 1000"  # a shell starts in time on any machine
    command = ["sh", "-c", f"setsid sh -c {shlex.quote(script)} & sleep 1000"]
    outcome = run_job([command], time_limit=2, num_threads=1)
    assert (outcome.status, outcome.reason) == ("timeout", "took longer than 2 s and was ended")
    assert not alive(int((tmp_path / "pid").read_text()))


def test_the_first_failure_ends_the_others_and_its_line_is_the_reason():
    script = "echo '[1,0]<stderr>:allstep: error: expected this, received that'; exit 2"
    outcome = run_job([["sh", "-c", script], ["sleep", "1000"]], time_limit=60, num_threads=1)
    assert (outcome.status, outcome.reason) == ("failed", "allstep: error: expected this, received that")
    assert run_job([["sh", "-c", "exit 3"]], time_limit=60, num_threads=1).reason == "ended with status 3"


def test_the_reason_of_a_failure_is_the_last_error_that_its_log_names():
    """Report a chained traceback through mpirun by its last exception, and a launch without one by its exit status."""
    program = "try:\n    [][1]\nexcept IndexError as error:\n    raise RuntimeError('no such device') from error"
    raised = (
        f"{shlex.join([sys.executable, '-c', program])} 2>&1 | sed 's/^/[1,1]<stderr>:/'; echo 2 ranks ended; exit 1"
    )
    outcome = run_job([["sh", "-c", raised]], time_limit=60, num_threads=1)
    assert (outcome.status, outcome.reason) == ("failed", "RuntimeError: no such device")
    assert "IndexError" in outcome.log


def test_what_an_interrupted_job_has_started_is_ended(tmp_path):
    """The child has its own session, as ranks have, so no signal to the job's process group reaches it."""
    written = tmp_path / "pid"
    program = (
        "import pathlib, subprocess, time; child = subprocess.Popen(['sleep', '300'], start_new_session=True); "
        f"pathlib.Path({str(written)!r}).write_text(str(child.pid)); time.sleep(300)"
    )
    with pytest.raises(KeyboardInterrupt), running([sys.executable, "-c", program]):
        while not written.exists() or not written.read_text():
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert not alive(int(written.read_text()))


def test_nothing_outlives_whoever_ran_a_job_and_was_killed(tmp_path):
    """The launched process has its own session, as ranks have."""
    written = tmp_path / "pid"
    launched = f"import os, time; open({str(written)!r}, 'w').write(str(os.getpid())); time.sleep(300)"
    command = ["setsid", "--wait", sys.executable, "-c", launched]
    program = f"from allstep.commands.shared.jobs import running\nwith running({command!r}) as job: job.wait(300)"
    deadline = time.monotonic() + 60
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        while not (written.exists() and written.read_text()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
    while alive(int(written.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("given", "num_threads", "expected"), [(None, None, "none"), ("3", None, "3"), ("3", 2, "2")])
def test_threads_are_left_to_the_ranks_or_to_the_user(given, num_threads, expected, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    command = ["sh", "-c", f'test "${{OMP_NUM_THREADS-none}}" = {expected}']
    assert run_job([command], time_limit=60, num_threads=num_threads).status == "ok"


def test_so_many_jobs_run_at_once(tmp_path):
    """The first two jobs wait for each other; each counts the running ones."""
    script = (
        "touch {0}.seen {0}.now; until [ -e 0.seen -a -e 1.seen ]; do sleep 0.05; done; echo *.now | wc -w; rm {0}.now"
    )
    commands = [[["sh", "-c", f"cd {tmp_path}; {script.format(number)}; exit {number + 1}"]] for number in range(3)]
    outcomes = dict(run_jobs(commands, at_once=2, time_limit=60, num_threads=1))
    assert [outcomes[number].reason for number in range(3)] == [f"ended with status {number}" for number in (1, 2, 3)]
    assert {outcome.log for outcome in outcomes.values()} <= {"1", "2"}
