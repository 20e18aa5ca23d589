"""What the watch costs rank 0 with thousands of ranks, and how soon it notices and agrees.

    python -m allstep.benchmarks.control_plane [--num-ranks 256,1024,4096] [--ranks-per-host 8] [--seconds 10]

A monitor as rank 0 has it hears members on loopback that send what ranks do, from coroutines of another process. Each
number of ranks is measured twice: with a connection for each rank, and with one for each host. The exit status is 0
where the watch of the most ranks keeps, by hosts, within 1 % of a core for each 1,000 ranks, has a stop agreed in 2 s,
and reports in 15 s who is lost.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from allstep.common.base.flag_types import Parser, listed, number, whole
from allstep.common.process.exit import run_rank
from allstep.common.watch import Limits, ProgressState
from allstep.common.watch.channel import Channel
from allstep.common.watch.monitor import Monitor
from allstep.common.watch.relay import BEAT_SECONDS, joined

TOKEN = "t" * 32
MAX_PERCENT_PER_1000, MAX_STOP_SECONDS, MAX_LOST_SECONDS = 1.0, 2.0, 15.0
LOST_RANK = 7


@dataclass(frozen=True)
class Cost:
    """What was measured with one number of ranks."""

    num_ranks: int
    num_connections: int
    start_seconds: float
    """From the first connection until all ranks know that all are there."""
    percent: float
    """Of a core, in the monitor's thread."""
    stop_seconds: float
    """From a notice to one rank until all know where to stop."""
    lost_seconds: float
    """From the end of a rank's connection until rank 0 has said so."""


def serve(num_ranks: int, control: Connection, errors: socket.socket) -> None:
    """Be rank 0: a monitor in a thread; tell by `control` what the thread costs, and end as rank 0 does."""
    os.dup2(errors.fileno(), sys.stderr.fileno())
    own, monitors_end = map(Channel, socket.socketpair())
    progress_state = ProgressState()
    monitor = Monitor(num_ranks, monitors_end, progress_state, Limits(stall=10.0, silence=30.0))
    listener = socket.create_server(("127.0.0.1", 0), backlog=num_ranks)
    monitor.listen(listener, TOKEN)
    control.send(listener.getsockname()[1])
    thread = threading.Thread(target=monitor.run, daemon=True)
    thread.start()
    threading.Thread(target=_first_rank, args=(own,), daemon=True).start()
    clock = time.pthread_getcpuclockid(thread.ident or 0)
    while True:
        control.recv()
        control.send(time.clock_gettime(clock))


def _first_rank(channel: Channel) -> None:
    """What the agent of rank 0 says."""
    while True:
        channel.send(**_beat())
        for message in channel.receive():
            if "freeze" in message:
                channel.send(begun=100)
        time.sleep(BEAT_SECONDS)


def _beat() -> dict:
    return {"moves": 1, "step": 1, "phase": "step", "is_new": True, "longest": 0.0, "first": 0.0}


class Member:
    """The ranks that one connection speaks for: one of them, or those of a host."""

    def __init__(self, ranks: Sequence[int], *, is_host: bool) -> None:
        self._ranks, self._is_host = ranks, is_host
        self.all_here, self.decided = asyncio.Event(), asyncio.Event()

    async def run(self, port: int) -> None:
        """Say what the ranks say, until the monitor is gone."""
        reader, self.writer = await asyncio.open_connection("127.0.0.1", port)
        self.send({"rank": self._ranks[0], "host": f"host{self._ranks[0]}", "token": TOKEN})
        if self._is_host:
            for rank in self._ranks[1:]:
                self.send(joined(rank, f"host{self._ranks[0]}"))
        beats = asyncio.create_task(self._beats())
        while line := await reader.readline():
            if b"all_here" in line:
                self.all_here.set()
            elif b"freeze" in line:
                self._say({rank: {"begun": 100 + rank % 3} for rank in self._ranks})
            elif b"last_tick" in line:
                assert json.loads(line)["last_tick"] == 102
                self.decided.set()
        beats.cancel()

    async def _beats(self) -> None:
        await asyncio.sleep(self._ranks[0] % 97 / 97 * BEAT_SECONDS)
        while True:
            self._say({rank: _beat() for rank in self._ranks})
            await asyncio.sleep(BEAT_SECONDS)

    def lose(self) -> None:
        """End a rank as the monitor hears of it."""
        if self._is_host:
            self._say({LOST_RANK: {"gone": True}})
        else:
            self.writer.close()

    def notice(self) -> None:
        """Receive a notice to end."""
        self._say({self._ranks[0]: {"notice": "SIGTERM"}})

    def _say(self, messages: dict[int, dict]) -> None:
        if self._is_host:
            self.send({"relayed": list(messages.items())})
        else:
            for message in messages.values():
                self.send(message)

    def send(self, message: dict) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")


async def measure(num_ranks: int, ranks_per_host: int, seconds: float) -> Cost:
    """The cost with so many ranks, `ranks_per_host` of which share a connection (1: each has its own)."""
    control, childs_end = multiprocessing.Pipe()
    errors, childs_errors = socket.socketpair()
    child = multiprocessing.Process(target=serve, args=(num_ranks, childs_end, childs_errors), daemon=True)
    child.start()
    childs_errors.close()
    port = control.recv()
    step = ranks_per_host
    hosts = [range(first, min(first + step, num_ranks)) for first in range(0, num_ranks, step)]
    hosts[0] = hosts[0][1:]  # rank 0 itself, and its host's ranks, which are connected to it directly
    members = [Member([rank], is_host=False) for rank in hosts[0]]
    members += [Member(ranks, is_host=step > 1) for ranks in hosts[1:]]
    started = time.monotonic()
    tasks = [asyncio.create_task(member.run(port)) for member in members]
    await asyncio.gather(*(member.all_here.wait() for member in members))
    start_seconds = time.monotonic() - started

    def cpu_seconds() -> float:
        control.send(None)
        return control.recv()

    await asyncio.sleep(2 * BEAT_SECONDS)
    before, started = cpu_seconds(), time.monotonic()
    await asyncio.sleep(seconds)
    percent = 100 * (cpu_seconds() - before) / (time.monotonic() - started)
    started = time.monotonic()
    members[-1].notice()
    await asyncio.gather(*(member.decided.wait() for member in members))
    stop_seconds = time.monotonic() - started
    started = time.monotonic()
    members[-1 if step > 1 else LOST_RANK - 1].lose()
    said = await asyncio.to_thread(errors.recv, 1000)
    lost_seconds = time.monotonic() - started
    assert f"rank {LOST_RANK} of {num_ranks}".encode() in said, said
    await asyncio.gather(*tasks, return_exceptions=True)
    child.join()
    return Cost(num_ranks, len(members), start_seconds, percent, stop_seconds, lost_seconds)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("python -m allstep.benchmarks.control_plane", __doc__)
    parser.add_argument("--num-ranks", type=listed(whole(16, 2**16)), default=(256, 1024, 4096), metavar="N,...")
    parser.add_argument("--ranks-per-host", type=whole(2, 64), default=8, metavar="N")
    parser.add_argument("--seconds", type=number(1, 600), default=10.0, metavar="N")
    args = parser.parse_args(argv)
    _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))
    print("ranks  connections  all there  of a core  per 1,000 ranks  stop agreed  loss reported")
    holds = True
    for num_ranks in sorted(args.num_ranks):
        for ranks_per_host in (1, args.ranks_per_host):
            cost = asyncio.run(measure(num_ranks, ranks_per_host, args.seconds))
            share = cost.percent / num_ranks * 1000
            print(
                f"{num_ranks:5}  {cost.num_connections:11}  {cost.start_seconds:7.2f} s  {cost.percent:7.2f} %  "
                f"{share:13.2f} %  {cost.stop_seconds:9.2f} s  {cost.lost_seconds:12.2f} s",
                flush=True,
            )
            is_soon = cost.stop_seconds <= MAX_STOP_SECONDS and cost.lost_seconds <= MAX_LOST_SECONDS
            holds = share <= MAX_PERCENT_PER_1000 and is_soon  # of the last: the most ranks, by hosts
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    run_rank(main)
