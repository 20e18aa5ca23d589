"""Jobs that run at the same time and take turns, block by block.

The speed of a machine changes from second to second by more than strategies differ, so two launches one after the other
cannot be compared. Instead, jobs are started one after the other, each waits where its clock would start, and then they
run one timed block each, in turn, again and again. Changes of the machine affect all of them alike.

Every rank connects to its job's socket, sends the number of ranks in the job, and waits for a byte before each block
and before it exits. A turn is over when all ranks of the job wait or have ended. Ranks that poll while they wait are
stopped (SIGSTOP) between their turns.
"""

from __future__ import annotations

import itertools
import os
import selectors
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from allstep.commands.shared import machine, process_tree
from allstep.commands.shared.jobs import Job, Outcome
from allstep.common.base.errors import Fault

_WAKE_SECONDS = 0.002  # until all threads of a stopped rank run again
_ROOM = 3  # free memory that the next job needs, over that of the largest so far: it may have more ranks


def join(path: Path | None, num_ranks: int) -> Callable[[], None]:
    """Join the jobs that take turns; return the function with which a rank waits for its next turn.

    `path` is the socket, None if it is always this rank's turn; `num_ranks` ranks join from this rank's launcher.
    """
    if path is None:
        return lambda: None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with _short(path) as address:
        connection.connect(address)

    def wait() -> None:
        connection.send(str(num_ranks).encode())
        if not connection.recv(1):
            raise Fault("the process that gave turns to this job has ended")

    return wait


@dataclass(frozen=True)
class Launch:
    """A job that takes turns."""

    commands: Sequence[Sequence[str]]
    socket: Path
    """Socket, still to be created, on which the ranks wait for their turns."""
    polls: bool
    """Whether ranks take processor time while they wait."""


Watch = Callable[[int, int], None]
"""Function that is told the number of a launch, and how many turns it has had: 0 when it starts."""


def run_in_turn(
    launches: Sequence[Launch],
    *,
    time_limit: float,
    num_threads: int,
    starting: int = 1,
    watch: Watch = lambda launch, num_turns: None,
) -> list[Outcome]:
    """Run jobs to their ends, as many at a time as fit into memory; if one fails, the others go on.

    All jobs have the same number of blocks.

    Args:
        time_limit: seconds of a job, without waiting, after which it is ended with every process that it started.
        num_threads: compute threads of each rank.
        starting: number of jobs that may start at the same time; with 1, a job has the machine to itself until its
            ranks wait for their first turn.
    """
    outcomes: list[Outcome] = []
    while len(outcomes) < len(launches):
        jobs: list[_Job] = []
        first = len(outcomes)
        with ExitStack() as stack:
            try:
                available = _available_memory()
                largest = np.zeros_like(available)
                for number, launch in enumerate(launches[first:], first):
                    watch(number, 0)
                    jobs.append(stack.enter_context(_Job.started(launch, time_limit, num_threads)))
                    for job in jobs[: max(0, len(jobs) + 1 - starting)]:
                        job.arrive()
                    before, available = available, _available_memory()
                    largest = np.maximum(largest, before - available)
                    if np.any(available < _ROOM * largest):
                        break
                _take_turns(jobs, lambda job, num_turns, first=first: watch(first + job, num_turns))
            finally:  # all at the same time after an interrupt: each may take seconds
                for job in jobs:
                    job.ask_to_end()
        outcomes += [job.outcome for job in jobs if job.outcome]  # all have one after _take_turns
    return outcomes


def _take_turns(jobs: Sequence[_Job], watch: Watch) -> None:
    for job in jobs:
        job.arrive()
    for num_turns in itertools.count(1):
        living = [job for job in jobs if job.outcome is None]
        if not living:
            return
        for job in living:
            job.resume()
            job.arrive()
            watch(jobs.index(job), num_turns)
            if job.outcome and job.outcome.status == "ok":  # all have the same number of blocks and are about to exit
                for other in living:
                    other.resume()


class _Job:
    """A job and its waiting ranks."""

    def __init__(self, launch: Launch, job: Job, listener: socket.socket, time_limit: float) -> None:
        self.outcome: Outcome | None = None
        self._job, self._launch, self._time_limit = job, launch, time_limit
        self._seconds = 0.0
        self._pids: dict[socket.socket, int] = {}
        self._waiting: list[socket.socket] = []
        self._num_ranks: int | None = None  # not known yet
        self._listener, self._selector = listener, selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    @classmethod
    @contextmanager
    def started(cls, launch: Launch, time_limit: float, num_threads: int) -> Iterator[_Job]:
        """Start a job; none of its processes is left when the block ends."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, tempfile.TemporaryFile() as output:
            with _short(launch.socket) as address:
                listener.bind(address)
            listener.listen()
            job = Job(launch.commands, output, {"OMP_NUM_THREADS": str(num_threads)})
            turn_taker = cls(launch, job, listener, time_limit)
            try:
                yield turn_taker
            finally:
                if turn_taker.outcome is None:
                    turn_taker.end()

    def arrive(self) -> None:
        """Wait until all ranks of the job wait for their next turn, or the job has ended."""
        started = time.perf_counter()
        while self.outcome is None and not self._all_wait():
            for key, _ in self._selector.select(process_tree.POLL_SECONDS):
                assert isinstance(key.fileobj, socket.socket)
                self._hear(key.fileobj)
            seconds = self._seconds + time.perf_counter() - started
            if self._all_wait():
                self._signal(signal.SIGSTOP)
                self._seconds = seconds
                return
            if result := self._job.result(seconds, self._time_limit):
                self.end()
                self.outcome = self._job.outcome(*result, seconds)

    def resume(self) -> None:
        """Give a turn to the ranks that wait for one."""
        if self._waiting:
            self._signal(signal.SIGCONT)
        for connection in self._waiting:
            with suppress(ConnectionError):  # the rank was killed; its launcher will report it
                connection.send(b"!")
        self._waiting.clear()

    def ask_to_end(self) -> None:
        """Ask the job to end, if it has not."""
        if self.outcome is None:
            self._signal(signal.SIGCONT)  # a stopped rank cannot handle the request to end
            self._job.ask_to_end()

    def end(self) -> None:
        """End the processes of the job that still run."""
        self.ask_to_end()
        self._job.end()
        while self._pids:
            self._pids.popitem()[0].close()
        self._selector.close()

    def _all_wait(self) -> bool:
        return len(self._waiting) == self._num_ranks

    def _hear(self, connection: socket.socket) -> None:
        if connection is self._listener:
            connection, _ = self._listener.accept()
            pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            self._pids[connection] = pid
            self._selector.register(connection, selectors.EVENT_READ)
            return
        message = b""
        with suppress(ConnectionError):
            message = connection.recv(16)
        if message:
            self._num_ranks = int(message) * len(self._launch.commands)
            self._waiting.append(connection)
        else:
            self._selector.unregister(connection)
            del self._pids[connection]
            connection.close()

    def _signal(self, number: int) -> None:
        if self._launch.polls and self._pids:
            for pid in self._pids.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(_WAKE_SECONDS)


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a short name of a path: sockets' names have at most 107 characters, and TMPDIR may be long."""
    folder = os.open(path.parent, os.O_PATH)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _available_memory() -> np.ndarray:
    """Return the free bytes of the host's memory and of each GPU's."""
    import psutil

    return np.array([psutil.virtual_memory().available, *machine.free_gpu_memory()])
