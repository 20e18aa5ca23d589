"""Jobs that take turns: real processes, which write down when each of their blocks began and ended."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from compared import TEST, launched_processes
from ranks import environment

from allstep.benchmarks.comparison import turns
from allstep.benchmarks.comparison.turns import Launch, run_in_turn

BLOCK_SECONDS = 0.3
NUM_BLOCKS = 3
RANK = f"""
import signal, sys, threading, time
from pathlib import Path
from allstep.benchmarks.comparison import turns

socket, log, name, behaviour = sys.argv[1:]
longest_gap = 0.0
Path(log).with_name(f"{{name}} starts").write_text(str(time.monotonic()))
time.sleep({BLOCK_SECONDS} if behaviour == "starts slowly" else 0)

def poll():
    global longest_gap
    last = time.monotonic()
    while True:
        time.sleep(0.001)
        now = time.monotonic()
        longest_gap, last = max(longest_gap, now - last), now

def leave_slowly(*_):
    asked_at = time.monotonic()
    time.sleep({BLOCK_SECONDS})
    Path(log).with_name(f"{{name}} leaves").write_text(f"{{asked_at}} {{time.monotonic()}}")
    sys.exit(1)

signal.signal(signal.SIGTERM, leave_slowly)
threading.Thread(target=poll, daemon=True).start()
Path(log).with_name(f"{{name}} waits").write_text(str(time.monotonic()))
wait_for_turn = turns.join(Path(socket), 1)
for block in range({NUM_BLOCKS}):
    wait_for_turn()
    started = time.monotonic()
    time.sleep({BLOCK_SECONDS})
    if block and behaviour == "fails":
        sys.exit(3)
    if block and behaviour == "hangs":
        time.sleep(1000)
    with open(log, "a") as file:
        print(name, started, time.monotonic(), file=file, flush=True)
wait_for_turn()
began = time.monotonic()
time.sleep({BLOCK_SECONDS})
Path(log).with_name(name).write_text(f"{{longest_gap}} {{began}} {{time.monotonic()}}")
"""


def launch(folder: Path, name: str, *, num_processes: int = 1, polls: bool = False, behaviour: str = "ends") -> Launch:
    socket = folder / f"{name}.socket"
    command = [sys.executable, "-c", RANK, str(socket), str(folder / "log"), name, behaviour]
    return Launch([command] * num_processes, socket, polls)


def blocks(folder: Path) -> list[tuple[str, float, float]]:
    """Name, begin and end of all blocks, in the order of their ends."""
    lines = (folder / "log").read_text().splitlines()
    return sorted(
        ((name, float(began), float(ended)) for name, began, ended in map(str.split, lines)), key=lambda block: block[2]
    )


def test_blocks_of_jobs_follow_each_other_in_turn_and_those_of_one_job_run_at_once(tmp_path):
    pair, single = launch(tmp_path, "pair", num_processes=2), launch(tmp_path, "single")
    outcomes = run_in_turn([pair, single], time_limit=60, num_threads=1)
    assert [outcome.status for outcome in outcomes] == ["ok", "ok"]
    found = blocks(tmp_path)
    assert [name for name, _, _ in found] == ["pair", "pair", "single"] * NUM_BLOCKS
    for first in range(0, len(found), 3):
        (_, began, ended), (_, began_too, ended_too), (_, single_began, single_ended) = found[first : first + 3]
        assert max(began, began_too) < min(ended, ended_too) and max(ended, ended_too) < single_began
        assert all(single_ended < began for _, began, _ in found[first + 3 : first + 5])
    # A job's seconds are its own, without those of the others' blocks.
    assert sum(outcome.seconds for outcome in outcomes) < time.time() - outcomes[0].launched_at


def test_ranks_that_poll_are_stopped_where_it_is_not_their_turn(tmp_path):
    run_in_turn([launch(tmp_path, "polling", polls=True), launch(tmp_path, "rival")], time_limit=60, num_threads=1)
    assert float((tmp_path / "polling").read_text().split()[0]) >= BLOCK_SECONDS


def test_when_one_has_left_the_others_leave_at_once(tmp_path):
    names = ["one", "two", "three"]
    run_in_turn([launch(tmp_path, name) for name in names], time_limit=60, num_threads=1)
    leaving = [[float(time) for time in (tmp_path / name).read_text().split()[1:]] for name in names]
    (_, first_ended), (began, ended), (began_too, ended_too) = leaving
    assert blocks(tmp_path)[-1][2] < first_ended < min(began, began_too) < max(began, began_too) < min(ended, ended_too)


@pytest.mark.parametrize("starting", [1, 2])
def test_a_job_starts_alone_or_while_the_one_before_starts(starting, tmp_path):
    slow = launch(tmp_path, "slow", behaviour="starts slowly")
    run_in_turn([slow, launch(tmp_path, "next")], time_limit=60, num_threads=1, starting=starting)
    waits, starts, next_waits = (
        float((tmp_path / name).read_text()) for name in ("slow waits", "next starts", "next waits")
    )
    assert (waits < starts) == (starting == 1)
    assert max(waits, next_waits) < min(began for _, began, _ in blocks(tmp_path))


def test_sockets_may_lie_in_folders_with_long_names(tmp_path):
    folder = tmp_path / ("long" * 50)
    folder.mkdir()
    [outcome] = run_in_turn([launch(folder, "one")], time_limit=60, num_threads=1)
    assert outcome.status == "ok"


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [("fails", ("failed", "ended with status 3")), ("hangs", ("timeout", "took longer than 5 s and was ended"))],
)
def test_who_fails_is_out_and_the_others_go_on(behaviour, expected, tmp_path, monkeypatch):
    monkeypatch.setenv(TEST, str(tmp_path))
    bad = launch(tmp_path, "bad", polls=True, behaviour=behaviour)
    outcomes = run_in_turn([bad, launch(tmp_path, "good", polls=True)], time_limit=5, num_threads=1)
    assert [(outcome.status, outcome.reason) for outcome in outcomes] == [expected, ("ok", None)]
    assert [name for name, _, _ in blocks(tmp_path)] == ["bad", *["good"] * NUM_BLOCKS]
    assert not launched_processes(str(tmp_path))


def test_jobs_that_do_not_fit_into_memory_run_one_after_the_other(tmp_path, monkeypatch):
    available = itertools.cycle((10, 5))  # before and after the start of a job: too little for another one
    monkeypatch.setattr(turns, "_available_memory", lambda: next(available))
    names = ["one", "two"]
    run_in_turn([launch(tmp_path, name) for name in names], time_limit=60, num_threads=1)
    assert [name for name, _, _ in blocks(tmp_path)] == [name for name in names for _ in range(NUM_BLOCKS)]


def test_who_interrupts_ends_all_at_once(tmp_path):
    names = ["one", "two", "three"]
    jobs = [launch(tmp_path, name, polls=True) for name in names]
    with giver_of_turns(jobs, tmp_path) as giver:
        wait_for_blocks(tmp_path, giver)
        giver.send_signal(signal.SIGINT)
    asked, gone = zip(*((tmp_path / f"{name} leaves").read_text().split() for name in names), strict=True)
    assert max(map(float, asked)) < min(map(float, gone))
    assert not launched_processes(str(tmp_path))


def test_stopped_ranks_do_not_outlive_a_giver_of_turns_that_is_killed(tmp_path):
    """A stopped process cannot notice that it is alone."""
    jobs = [launch(tmp_path, "stopped", polls=True), launch(tmp_path, "running", behaviour="hangs")]
    with giver_of_turns(jobs, tmp_path) as giver:
        deadline = wait_for_blocks(tmp_path, giver)
        os.kill(giver.pid, signal.SIGKILL)
    while launched_processes(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = launched_processes(str(tmp_path))
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def giver_of_turns(jobs: list[Launch], folder: Path) -> subprocess.Popen:
    """A process that gives turns to jobs, and can be interrupted."""
    program = (
        "import signal; from pathlib import Path, PosixPath; from allstep.benchmarks.comparison.turns import *; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"run_in_turn({jobs!r}, time_limit=1000, num_threads=1)"
    )
    return subprocess.Popen([sys.executable, "-c", program], env=environment(**{TEST: str(folder)}))


def wait_for_blocks(folder: Path, giver: subprocess.Popen) -> float:
    """Until three blocks are done; returns when to stop waiting for other things as well."""
    deadline = time.monotonic() + 60
    while not (folder / "log").exists() or len(blocks(folder)) < 3:
        assert giver.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return deadline
