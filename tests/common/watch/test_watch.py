"""Conclusions of the watchdog, and the agreement of ranks to stop. Oracles are named in the tests."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import sys
import threading
import time
import types

import pytest
from ranks import run

from allstep.common.launch.placement import ALONE
from allstep.common.watch import Limits, ProgressState, stall_detection, watching
from allstep.common.watch import agent as agent_module
from allstep.common.watch import channel as channel_module
from allstep.common.watch import monitor as monitor_module
from allstep.common.watch.agent import Agent
from allstep.common.watch.channel import Channel
from allstep.common.watch.monitor import Monitor
from allstep.common.watch.stall_detection import Seen

NUM_RANKS = 4
NOW = 1000.0
TIMEOUT = 10.0


class Ranks:
    """Threads that run the same ticks and wait for each other in each, as ranks do in a collective."""

    def __init__(self, num_ticks: int) -> None:
        self.progress_states = [ProgressState() for _ in range(NUM_RANKS)]
        self.ended: list[int] = [0] * NUM_RANKS
        self._num_ticks, self._barrier = num_ticks, threading.Barrier(NUM_RANKS)
        self.threads = [threading.Thread(target=self._train, args=(rank,), daemon=True) for rank in range(NUM_RANKS)]

    def _train(self, rank: int) -> None:
        chance = random.Random(rank)
        for tick in range(1, self._num_ticks + 1):
            if not self.progress_states[rank].begin_tick():
                return
            time.sleep(chance.random() * 1e-4)
            self._barrier.wait()
            self.ended[rank] = tick


@pytest.mark.parametrize("seed", range(20))
def test_ranks_stop_after_the_same_tick_whenever_they_are_asked(seed):
    """Oracle: all have ended the decided tick, and none waits for another; a barrier that hangs fails the join."""
    chance = random.Random(seed)
    ranks = Ranks(num_ticks=100_000)
    for thread in ranks.threads:
        thread.start()
    time.sleep(chance.random() * 0.02)
    order = chance.sample(range(NUM_RANKS), NUM_RANKS)
    begun = []
    for rank in order:
        begun.append(ranks.progress_states[rank].freeze())
        time.sleep(chance.random() * 0.002)
    last_tick = max(1, *begun)
    for rank in reversed(order):
        ranks.progress_states[rank].decide(last_tick, "SIGTERM")
        time.sleep(chance.random() * 0.002)
    for thread in ranks.threads:
        thread.join(10)
        assert not thread.is_alive()
    assert ranks.ended == [last_tick] * NUM_RANKS


def seen(rank: int, phase: str, moves: int, idle: float, *, is_new: bool = False, longest: float = 0.0) -> Seen:
    state = Seen(rank, f"host{rank}", heard_at=NOW, moved_at=NOW - idle, step=7, phase=phase, is_new=is_new)
    state.moves, state.longest = moves, longest
    return state


STALLS = {
    "stuck in the input": ([("step", 9, 12), ("input", 8, 12)], [1], [0], False),
    "went on without a collective": ([("step", 8, 12), ("sums", 9, 11)], [1], [0], True),
    "all in one step": ([("step", 8, 12), ("step", 8, 12)], [0, 1], [], False),
}


@pytest.mark.parametrize("name", STALLS)
def test_who_is_missing(name):
    """Each state is a phase, the number of moves, and the seconds since the last move."""
    states, missing, waiting, went_on = STALLS[name]
    stall = stall_detection.stalled([seen(rank, *state) for rank, state in enumerate(states)], NOW, TIMEOUT)
    assert ([one.rank for one in stall.missing], [one.rank for one in stall.waiting]) == (missing, waiting)
    assert stall.went_on == went_on


@pytest.mark.parametrize("phase", ["start", "compile", "step"])
def test_a_first_step_may_take_as_long_again_as_that_of_the_others(phase):
    """The other rank took 3 s, or 20 s, and has waited since, which proves that all have compiled."""
    after = {"start": "input", "compile": "step", "step": "check"}[phase]

    def is_stalled(took: float, waited: float) -> bool:
        ranks = [seen(0, after, 3, waited), seen(1, phase, 2, took + waited, is_new=True)]
        return stall_detection.stalled(ranks, NOW, TIMEOUT) is not None

    assert not is_stalled(3, 9) and is_stalled(3, 11)
    assert not is_stalled(20, 19) and is_stalled(20, 21)


def test_a_step_that_takes_long_on_all_is_no_stall_when_the_first_is_done():
    """A step of another shape is compiled for 25 s, after steps of 1 s."""

    def is_stalled(took: float, waited: float) -> bool:
        ranks = [seen(0, "check", 9, waited), seen(1, "step", 8, took + waited, longest=1)]
        return stall_detection.stalled(ranks, NOW, TIMEOUT) is not None

    assert not is_stalled(25, 0) and not is_stalled(25, 9) and is_stalled(25, 10)
    assert is_stalled(130, 0)  # the other ranks keep going on without it


def test_ranks_that_have_ended_are_missing_where_others_wait_for_their_gradients():
    """Another rank may be busy without them; where its tensors are not known, it is in a collective, for longer."""
    ended, waiting = seen(0, "hooks", 9, 200), {idle: seen(1, "step", 10, idle) for idle in (9, 11, 119, 121)}

    def conclusion(idle: float, tensors: list[str], in_collective: bool) -> str:
        stall = stall_detection.left_behind([waiting[idle]], [ended], NOW, TIMEOUT)
        answers = {1: tensors}, {1: in_collective}
        stall = stall and stall_detection.confirm_left_behind(stall, TIMEOUT, *answers)
        return stall_detection.report_stall(stall, 2, {1: tensors}, {}) if stall else ""

    assert not conclusion(9, ["weight"], True) and not conclusion(119, [], True) and not conclusion(121, [], False)
    assert "rank 0 of 2 on host0 stopped at step 7: its run has ended" in conclusion(11, ["weight"], True)
    assert "rank 1 on host1 waits in step 7 for the gradients" in conclusion(121, [], True)
    assert stall_detection.left_behind([seen(1, "writing", 10, 121)], [ended], NOW, TIMEOUT) is None
    waiting[11] = seen(1, "check", 10, 11)  # in the check of replicas, a collective is one of all ranks
    assert "rank 1 on host1 waits in the replica check" in conclusion(11, [], True) and not conclusion(11, [], False)


def test_who_hangs_after_a_collective_is_missing_and_who_waits_in_one_is_not():
    ranks = [seen(0, "check", 9, 12), seen(1, "step", 8, 12)]
    stall = stall_detection.stalled(ranks, NOW, TIMEOUT)
    hangs = stall_detection.split_waiting_and_missing(stall, TIMEOUT, {}, {0: True, 1: False})
    assert ([one.rank for one in hangs.missing], hangs.went_on) == ([1], False)
    waits = stall_detection.split_waiting_and_missing(stall, TIMEOUT, {}, {0: True, 1: True})
    assert ([one.rank for one in waits.missing], waits.went_on) == ([0], True)


HEALTHY = {
    "the last one has just moved": [seen(0, "step", 9, 30), seen(1, "input", 8, 1)],
    "a step that compiles": [seen(rank, "step", 2, 3000, is_new=True) for rank in range(2)],
    "a step of another size that --compile compiles": [seen(rank, "compile", 2, 3000) for rank in range(2)],
    "all start, and rank 0 may read a checkpoint": [seen(rank, "start", 0, 599, is_new=True) for rank in range(2)],
    "a validation that compiles on all": [seen(rank, "validation", 9, 599, is_new=True) for rank in range(2)],
    "a validation that compiles": [seen(0, "sums", 9, 100), seen(1, "validation", 8, 110, is_new=True)],
    "its batches take as long as that": [seen(0, "step", 9, 30), seen(1, "input", 8, 20, longest=8)],
    "rank 0 writes": [seen(0, "writing", 8, 999), seen(1, "input", 9, 999)],
    "rank 0 reports": [seen(0, "reporting", 8, 999), seen(1, "input", 9, 999)],
    "nobody waits for the only one": [seen(0, "input", 8, 999)],
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_no_stall(name):
    assert stall_detection.stalled(HEALTHY[name], NOW, TIMEOUT) is None


@pytest.mark.parametrize("phase", ["start", "input", "validation"])
def test_what_all_do_for_the_first_time_is_a_stall_in_the_end(phase):
    """All phases have a limit except the step itself, which may compile for any time."""
    stall = stall_detection.stalled([seen(rank, phase, 2, 601, is_new=True) for rank in range(2)], NOW, TIMEOUT)
    for in_framework in (True, False):
        split = stall_detection.split_waiting_and_missing(stall, TIMEOUT, {}, dict.fromkeys(range(2), in_framework))
        assert [one.rank for one in split.missing] == [0, 1]


def within_a_step(seconds: float, longest: float = 0.0) -> stall_detection.Stall:
    return stall_detection.stalled([seen(rank, "step", 8, seconds, longest=longest) for rank in range(2)], NOW, TIMEOUT)


def test_tensors_tell_who_waits_within_a_step():
    names = {0: ["fc.weight"], 1: []}
    stall = stall_detection.split_waiting_and_missing(within_a_step(12), TIMEOUT, names, {0: False, 1: True})
    report = stall_detection.report_stall(stall, 2, names, {1: "  its stack"})
    assert "rank 1 of 2 on host1 stopped at step 7: stuck for 12 s in step 7\n" in report
    assert "rank 0 on host0 waits in step 7 for fc.weight\n" in report and report.endswith("  its stack")


def test_who_is_outside_the_framework_is_missing_where_tensors_are_not_known():
    stall = stall_detection.split_waiting_and_missing(within_a_step(12), TIMEOUT, {}, {0: True, 1: False})
    assert [one.rank for one in stall.missing] == [1]


def test_a_slow_step_of_all_is_a_stall_in_the_end():
    inside = {0: True, 1: True}
    assert stall_detection.split_waiting_and_missing(within_a_step(119), TIMEOUT, {}, inside) is None
    assert stall_detection.split_waiting_and_missing(within_a_step(121), TIMEOUT, {}, inside)
    assert stall_detection.split_waiting_and_missing(within_a_step(299, longest=30), TIMEOUT, {}, inside) is None


def test_strangers_are_turned_away_and_a_rank_is_let_in():
    """Any process may connect to the monitor's port. Oracle: the peers that are connected afterwards."""
    first, own = map(Channel, socket.socketpair())
    monitor = Monitor(2, own, ProgressState(), Limits(stall=10, silence=30))
    watch = threading.Thread(target=monitor.run, daemon=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monitor.listen(listener, "secret")
        watch.start()
        connect = lambda: socket.create_connection(listener.getsockname(), timeout=5)  # noqa: E731
        greetings = [b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"rank": 1}\n', b"\xff\n", b"", b"x" * (1 << 21)]
        greetings += [b'{"rank": 1e999, "host": "a", "token": "guess"}\n', b"[" * 100_000 + b"\n"]
        wrong = [{"rank": 1, "host": "a", "token": "guess"}, {"rank": 0, "host": "a", "token": "secret"}]
        for greeting in [*greetings, *(json.dumps(one).encode() + b"\n" for one in wrong)]:
            with connect() as stranger:
                try:
                    stranger.sendall(greeting)
                    stranger.shutdown(socket.SHUT_WR)
                    assert stranger.recv(100) == b""
                except OSError:
                    pass  # turned away before it had sent everything
        with connect() as rank:
            greeting = json.dumps({"rank": 1, "host": "a", "token": "secret"}).encode() + b"\n"
            rank.sendall(greeting[:9])  # it may come in pieces
            time.sleep(0.1)
            rank.sendall(greeting[9:])
            assert json.loads(rank.makefile().readline()) == {"all_here": True}
            first.send(finished=True)  # sent before the rank's message, and enough to finish the run for both
            rank.sendall(b'{"finished": true}\n')
    first.close()
    watch.join(30)
    assert not watch.is_alive()


FAILS = """
import socket, threading
from allstep.common.process.exit import run_rank
from allstep.common.launch.placement import find_placement
from allstep.common.watch import Limits, ProgressState
from allstep.common.watch.channel import Channel
from allstep.common.watch.agent import Agent

def fail():
    first, own = map(Channel, socket.socketpair())
    agent = Agent(find_placement(), own, ProgressState(), Limits(stall=10, silence=30), list, first_host="a")
    for watch in (agent.run, lambda: ask(first)):
        threading.Thread(target=watch, daemon=True).start()
    raise OSError("lost the disk")

def ask(channel):
    while True:
        channel.send(ask="where")
        if any(answer.get("failed") for answer in channel.receive()):
            return print("it has failed", flush=True)

run_rank(fail)
"""


def test_a_rank_that_waits_for_its_turn_to_tell_says_so_when_it_is_asked():
    """Otherwise it would be reported as stuck if its turn takes longer than --stall-timeout."""
    placement = {"RANK": "16", "SIZE": "32", "LOCAL_RANK": "16", "LOCAL_SIZE": "32"}
    failed = run(
        sys.executable, "-c", FAILS, **{f"OMPI_COMM_WORLD_{name}": number for name, number in placement.items()}
    )
    assert (failed.returncode, failed.stdout) == (1, "it has failed\n"), failed.output
    assert "rank 16 of 32" in failed.stderr and "lost the disk" in failed.stderr


@pytest.mark.parametrize("failed", [False, True])
def test_a_stall_is_not_told_where_a_rank_is_about_to_tell_what_has_failed(failed, monkeypatch):
    """Rank 1 does not move. If the monitor asks the ranks again, it has not reported the stall."""
    left, asked = threading.Event(), threading.Semaphore(0)
    monkeypatch.setattr(monitor_module, "leave", lambda *_: left.set() or threading.Event().wait())
    places = ({"moves": 9, "phase": "step"}, {"moves": 8, "phase": "input"})
    pairs = [tuple(map(Channel, socket.socketpair())) for _ in places]

    def take_part(rank: int) -> None:
        end, messages = pairs[rank][0], []
        with contextlib.suppress(EOFError):  # the monitor has reported
            while not any("bye" in message for message in messages):
                end.send(**places[rank], step=1, is_new=False, longest=0.0, first=0.0)
                messages = end.receive()
                if any("ask" in message for message in messages):
                    asked.release()
                    end.send(stack="", tensors=[], in_framework=False, in_collective=False, failed=failed and rank == 1)

    monitor = Monitor(2, pairs[0][1], ProgressState(), Limits(stall=0.1, silence=600))
    monitor._admit(1, "server2", pairs[1][1])
    ranks = [threading.Thread(target=take_part, args=(rank,), daemon=True) for rank in range(2)]
    for thread in (threading.Thread(target=monitor.run, daemon=True), *ranks):
        thread.start()
    assert all(asked.acquire(timeout=30) for _ in range(3)) if failed else left.wait(30)
    assert left.is_set() != failed
    for end, _ in pairs:
        end.send(finished=True)
    for thread in ranks:
        thread.join(30)


def test_a_suspended_job_goes_on_when_it_is_continued(monkeypatch):
    """The clock jumps by a day, for the agent and the monitor alike. Each would take the other for lost."""
    left, jump = threading.Event(), 0.0
    for module in (agent_module, monitor_module):
        monkeypatch.setattr(module, "leave", lambda *_: left.set() or threading.Event().wait())
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + jump)
    monkeypatch.setattr(channel_module, "time", clock)
    end, monitors_end = map(Channel, socket.socketpair())
    progress, limits = ProgressState(), Limits(stall=10, silence=30)
    agent = Agent(ALONE, end, progress, limits, list, first_host="a")
    parts = Monitor(1, monitors_end, progress, limits), agent
    threads = [threading.Thread(target=part.run, daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    agent.wait_for_all()
    jump = 86_400.0
    assert not left.wait(2 * channel_module.BEAT_SECONDS)
    agent.finish()
    for thread in threads:
        thread.join(30)


def test_an_error_that_is_caught_leaves_no_watch_of_a_rank_alone():
    """A notebook goes on in the same process, which the watch of an earlier run must not end."""
    before = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError), watching(None, ALONE, ProgressState(), Limits(stall=10, silence=30)):
        raise ZeroDivisionError
    assert set(threading.enumerate()) <= before


def test_a_notice_stops_a_rank_alone():
    """Oracle: the next tick does not begin, and later notices are ignored."""
    progress_state = ProgressState()
    progress_state.enter("input")  # before this phase there is nothing to save, and a notice ends the process at once
    with watching(None, ALONE, progress_state, Limits(stall=10, silence=30)):
        assert progress_state.begin_tick()
        os.kill(os.getpid(), signal.SIGUSR1)
        while not progress_state.notice:
            time.sleep(0.01)
        assert not progress_state.begin_tick() and progress_state.notice == "SIGUSR1"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # stopped: a second notice must not end it in between
