"""Jobs that take turns: real processes that log the start and end of each of their blocks."""

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

from allstep.commands.shared import turns
from allstep.commands.shared.turns import Launch, run_in_turn

pytestmark = pytest.mark.launch

BLOCK_SECONDS = 0.3
NUM_BLOCKS = 3
RANK = f"""
import os, signal, sys, threading, time
from pathlib import Path
from allstep.commands.shared import turns

socket, log, name, behaviour, num_processes, leaves_with = sys.argv[1:]
folder = Path(log).parent
longest_gap = 0.0

def meet(what, number):
    # Wait, also on a crowded machine, until `number` processes are here; the time limit ends a vain wait.
    (folder / f"{{what}} {{os.getpid()}}").touch()
    while len(list(folder.glob(f"{{what}} *"))) < int(number):
        time.sleep(0.005)

(folder / f"{{name}} starts").write_text(str(time.monotonic()))
time.sleep({BLOCK_SECONDS} if behaviour == "starts slowly" else 0)
while behaviour == "starts with next" and not (folder / "next starts").exists():
    time.sleep(0.005)

def poll():
    global longest_gap
    last = time.monotonic()
    while True:
        time.sleep(0.001)
        now = time.monotonic()
        longest_gap, last = max(longest_gap, now - last), now

def leave_slowly(*_):
    meet("asked to leave", leaves_with)
    (folder / f"{{name}} leaves").touch()
    sys.exit(1)

signal.signal(signal.SIGTERM, leave_slowly)
threading.Thread(target=poll, daemon=True).start()
(folder / f"{{name}} waits").write_text(str(time.monotonic()))
wait_for_turn = turns.join(Path(socket), 1)
for block in range({NUM_BLOCKS}):
    wait_for_turn()
    started = time.monotonic()
    meet(f"{{name}} in block {{block}}", num_processes)
    time.sleep({BLOCK_SECONDS})
    if block and behaviour == "fails":
        sys.exit(3)
    if block and behaviour == "hangs":
        time.sleep(1000)
    with open(log, "a") as file:
        print(name, started, time.monotonic(), file=file, flush=True)
wait_for_turn()
began = time.monotonic()
if name != "one":
    meet("leaves", leaves_with)
time.sleep({BLOCK_SECONDS})
(folder / name).write_text(f"{{longest_gap}} {{began}} {{time.monotonic()}}")
"""


def launch(
    folder: Path,
    name: str,
    *,
    num_processes: int = 1,
    polls: bool = False,
    behaviour: str = "ends",
    leaves_with: int = 1,
) -> Launch:
    """Return a job whose processes wait for `leaves_with` others when they leave or are asked to, except job "one"."""
    socket = folder / f"{name}.socket"
    words = [socket, folder / "log", name, behaviour, num_processes, leaves_with]
    command = [sys.executable, "-c", RANK, *map(str, words)]
    return Launch([command] * num_processes, socket, polls)


def blocks(folder: Path) -> list[tuple[str, float, float]]:
    """Return name, start and end of all blocks, sorted by their ends."""
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
        (_, _, ended), (_, _, ended_too), (_, single_began, single_ended) = found[first : first + 3]
        assert max(ended, ended_too) < single_began  # both processes were in the block at once
        assert all(single_ended < began for _, began, _ in found[first + 3 : first + 5])
    # A job's seconds exclude the other jobs' blocks.
    assert sum(outcome.seconds for outcome in outcomes) < time.time() - outcomes[0].launched_at


def test_ranks_that_poll_are_stopped_where_it_is_not_their_turn(tmp_path):
    run_in_turn([launch(tmp_path, "polling", polls=True), launch(tmp_path, "rival")], time_limit=60, num_threads=1)
    assert float((tmp_path / "polling").read_text().split()[0]) >= BLOCK_SECONDS


def test_when_one_has_left_the_others_leave_at_once(tmp_path):
    names = ["one", "two", "three"]
    outcomes = run_in_turn([launch(tmp_path, name, leaves_with=2) for name in names], time_limit=60, num_threads=1)
    assert [outcome.status for outcome in outcomes] == ["ok"] * 3  # so the other two waited for each other
    leaving = [[float(time) for time in (tmp_path / name).read_text().split()[1:]] for name in names]
    (_, first_ended), (began, _), (began_too, _) = leaving
    assert blocks(tmp_path)[-1][2] < first_ended < min(began, began_too)


@pytest.mark.parametrize("starting", [1, 2])
def test_a_job_starts_alone_or_while_the_one_before_starts(starting, tmp_path):
    slow = launch(tmp_path, "slow", behaviour="starts slowly" if starting == 1 else "starts with next")
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
    [("fails", ("failed", "ended with status 3")), ("hangs", ("timeout", "took longer than {} s and was ended"))],
)
def test_who_fails_is_out_and_the_others_go_on(behaviour, expected, tmp_path, monkeypatch):
    """Allow ten times the start-up time of a rank on this machine now, which is enough for a job that ends."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "from allstep.commands.shared import turns"], check=True)
    time_limit = max(5, round(10 * (time.monotonic() - began)))
    expected = expected[0], expected[1].format(time_limit)
    monkeypatch.setenv(TEST, str(tmp_path))
    bad = launch(tmp_path, "bad", polls=True, behaviour=behaviour)
    outcomes = run_in_turn([bad, launch(tmp_path, "good", polls=True)], time_limit=time_limit, num_threads=1)
    assert [(outcome.status, outcome.reason) for outcome in outcomes] == [expected, ("ok", None)]
    assert [name for name, _, _ in blocks(tmp_path)] == ["bad", *["good"] * NUM_BLOCKS]
    assert not launched_processes(str(tmp_path))


def test_jobs_that_do_not_fit_into_memory_run_one_after_the_other(tmp_path, monkeypatch):
    available = itertools.cycle((10, 5))  # GB before and after a job starts: too little for another one
    monkeypatch.setattr(turns, "_available_memory", lambda: next(available))
    names = ["one", "two"]
    run_in_turn([launch(tmp_path, name) for name in names], time_limit=60, num_threads=1)
    assert [name for name, _, _ in blocks(tmp_path)] == [name for name in names for _ in range(NUM_BLOCKS)]


def test_who_interrupts_ends_all_at_once(tmp_path):
    names = ["one", "two", "three"]
    jobs = [launch(tmp_path, name, polls=True, leaves_with=3) for name in names]
    with giver_of_turns(jobs, tmp_path) as giver:
        deadline = wait_for_blocks(tmp_path, giver)
        giver.send_signal(signal.SIGINT)
    assert all((tmp_path / f"{name} leaves").exists() for name in names)  # each had waited for the others
    end_of_launched(tmp_path, deadline)


def test_stopped_ranks_do_not_outlive_a_giver_of_turns_that_is_killed(tmp_path):
    """A stopped process cannot notice that its parent has died."""
    jobs = [launch(tmp_path, "stopped", polls=True), launch(tmp_path, "running", behaviour="hangs")]
    with giver_of_turns(jobs, tmp_path) as giver:
        deadline = wait_for_blocks(tmp_path, giver)
        os.kill(giver.pid, signal.SIGKILL)
    end_of_launched(tmp_path, deadline)


def end_of_launched(folder: Path, deadline: float) -> None:
    """Wait until no process of the jobs is left; end those that are at the deadline."""
    while launched_processes(str(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = launched_processes(str(folder))
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def giver_of_turns(jobs: list[Launch], folder: Path) -> subprocess.Popen:
    """Start a process that gives turns to jobs and can be interrupted."""
    program = (
        "import signal; from pathlib import Path, PosixPath; from allstep.commands.shared.turns import *; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"run_in_turn({jobs!r}, time_limit=1000, num_threads=1)"
    )
    return subprocess.Popen([sys.executable, "-c", program], env=environment(**{TEST: str(folder)}))


def wait_for_blocks(folder: Path, giver: subprocess.Popen) -> float:
    """Wait until three blocks are done and return the deadline for further waits."""
    deadline = time.monotonic() + 60
    while not (folder / "log").exists() or len(blocks(folder)) < 3:
        assert giver.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return deadline
