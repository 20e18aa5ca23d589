"""Elastic jobs that are started to be disturbed: their hosts, the mishaps that can happen, and their progress."""

import json
import os
import random
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from allstep.commands.shared.process_tree import POLL_SECONDS
from allstep.commands.shared.records.runs import FILE
from allstep.commands.soak.faults import Violation, check_clean
from allstep.commands.soak.training import Training, training, words_of
from allstep.common.base.progress_bar import ProgressBar
from allstep.common.launch.rendezvous import free_ports

KILLED, FROZEN, LEFT, CUT = "a killed rank", "a frozen rank", "a host that leaves and returns", "a cut link"
NUM_RANKS = 4
PATIENCE_SECONDS = 120


@dataclass(frozen=True)
class Hosts:
    """Two hosts whose processes are all visible to this process."""

    names: tuple[str, str]
    links: dict[str, str] = field(default_factory=dict)
    """Network device of this machine that leads to each host; empty if links cannot be cut."""

    @property
    def mishaps(self) -> tuple[str, ...]:
        """Mishaps that can happen to ranks on these hosts."""
        return (KILLED, FROZEN, LEFT, *([CUT] if self.links else []))

    def listed(self, without: str | None = None) -> str:
        """Return the output of a host discovery script, optionally without one of the hosts."""
        return "".join(f"{name}:{NUM_RANKS // 2}\n" for name in self.names if name != without)


LOCAL = Hosts(("localhost", "127.0.0.1"))
"""This machine under two names."""
BED_DIRECTORY = Path("/run/bed")
"""Directory of tests/cluster/two_hosts.sh on its launcher host."""
BED = Hosts(("server1", "server2"), {"server1": "v1", "server2": "v2"})
"""The two other hosts of tests/cluster/two_hosts.sh."""


@dataclass
class Stand:
    """Progress of a job."""

    num_starts: int = 0
    """Number of times that the ranks have formed a job."""
    num_ranks: int = 0
    """Number of ranks since the last start."""
    steps_since: int = 0
    """Number of steps since the last start."""


class Follower:
    """Reads the metrics.jsonl of a running job; each start of the ranks replaces the file with a shorter one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._rest = ""

    def stand(self) -> Stand:
        """Return the current progress of the job."""
        with suppress(FileNotFoundError):
            if self._file is None or os.fstat(self._file.fileno()).st_ino != self._path.stat().st_ino:
                self.close()
                self._file, self._rest, self._stand = self._path.open(), "", Stand()
        if self._file is None:
            return Stand()
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        for event in map(json.loads, lines):
            if event["event"] == "start":
                self._stand = Stand(self._stand.num_starts + 1, event["world_size"])
            elif event["event"] == "step":
                self._stand.steps_since += 1
        return self._stand

    def close(self) -> None:
        if self._file:
            self._file.close()


class ElasticJob:
    """Four ranks on two hosts; the job continues with the ranks that are left."""

    def __init__(
        self,
        job: Training,
        program: str,
        hosts: Hosts,
        follower: Follower,
        *,
        leave: Callable[[str], Callable[[], None]],
        can_leave: Sequence[str],
    ) -> None:
        """Take `leave`, which takes one of the hosts in `can_leave` out and returns a function that lets it return."""
        self._job, self._program, self._hosts, self._follower = job, program, hosts, follower
        self._leave, self._can_leave = leave, can_leave
        self.mark = job.mark

    def ranks(self) -> list[int]:
        """Return the process ids of all ranks."""
        return [pid for pid in self._job.left() if words_of(pid)[1:3] == ["-m", self._program]]

    def wait(self, is_there: Callable[[Stand], bool]) -> Stand:
        """Wait until the progress of the job satisfies `is_there`, and return it.

        Raises Violation if the job has ended, or makes no progress.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not is_there(stand := self._follower.stand()):
            if self._job.status is not None:
                raise Violation(f"ended with status {self._job.status}: {self._job.printed()}")
            if time.monotonic() > deadline:
                raise Violation(f"stands still at {stand}: {self._job.printed()}")
            time.sleep(POLL_SECONDS)
        return stand

    def suffer(self, mishap: str, chance: random.Random) -> Callable[[], None]:
        """Let a mishap happen and return a function that lets a lost host return."""
        host = chance.choice(self._can_leave)
        if mishap == LEFT:
            return self._leave(host)
        if mishap == CUT:
            device = self._hosts.links[host]
            _set_link(device, "down")
            return lambda: _set_link(device, "up")
        os.kill(chance.choice(self.ranks()), signal.SIGKILL if mishap == KILLED else signal.SIGSTOP)
        return lambda: None

    def stop(self) -> None:
        """Ask the job to save its state and to end. Raises Violation if it does not end well, or leaves processes."""
        os.kill(self.ranks()[0], signal.SIGUSR1)
        if self._job.wait(PATIENCE_SECONDS):
            raise Violation(f"expected status 0, received {self._job.status}: {self._job.printed()}")
        check_clean(self._job)


@contextmanager
def elastic_job(program: str, hosts: Hosts, directory: Path, *flags: object) -> Iterator[ElasticJob]:
    """Run `python -m program` under elastic horovodrun until the block ends, with output directory `directory`/run."""
    listed, output_dir = directory / "hosts", directory / "run"
    listed.write_text(hosts.listed())
    command = [
        *("horovodrun", "-np", NUM_RANKS, "--min-np", NUM_RANKS // 2, "--max-np", NUM_RANKS),
        *("--host-discovery-script", f"cat {listed}", "--blacklist-cooldown-range", 1, 2),
        *("--max-host-failures", 1_000_000),  # the hosts are not at fault
        *("python", "-m", program, *flags, "--output-dir", output_dir),
    ]

    def list_hosts(text: str) -> None:
        new = listed.with_suffix(".new")
        new.write_text(text)
        new.rename(listed)  # atomic: the script prints either the old or the new list

    def leave(host: str) -> Callable[[], None]:
        list_hosts(hosts.listed(without=host))
        return lambda: list_hosts(hosts.listed())

    with closing(Follower(output_dir / FILE)) as follower, training(command, output_dir, NUM_RANKS) as job:
        yield ElasticJob(job, program, hosts, follower, leave=leave, can_leave=hosts.names)


def disturb(
    job: ElasticJob, mishaps: Sequence[str], until: float, chance: random.Random, progress: ProgressBar
) -> dict[str, list[float]]:
    """Let at least one mishap happen, until the time `until`; return the seconds of each recovery by kind of mishap."""
    seconds = defaultdict(list)
    while True:
        before = job.wait(lambda stand: stand.num_ranks == NUM_RANKS and stand.steps_since > 20).num_starts
        if seconds and time.monotonic() > until:
            return seconds
        time.sleep(chance.uniform(0, 1))
        mishap, started = chance.choice(mishaps), time.monotonic()
        let_return = job.suffer(mishap, chance)
        job.wait(lambda stand, before=before: stand.num_starts > before and stand.steps_since > 0)
        seconds[mishap].append(time.monotonic() - started)
        progress.reach(min(progress.total, progress.total - (until - time.monotonic())))
        progress.end(f"{mishap}: steps went on after {seconds[mishap][-1]:.1f} s", parts=0)
        if mishap in (LEFT, CUT):
            started = time.monotonic()
            let_return()
            job.wait(lambda stand: stand.num_ranks == NUM_RANKS and stand.steps_since > 0)
            seconds[f"its ranks are there again after {mishap}"].append(time.monotonic() - started)


def _set_link(device: str, state: str) -> None:
    subprocess.run(["ip", "link", "set", device, state], check=True)


STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Variables that keep restarted ranks from waiting for their predecessors (docs/elastic.md)."""


@contextmanager
def torchrun_job(program: str, directory: Path, *flags: object) -> Iterator[ElasticJob]:
    """Run `python -m program` under two agents of torchrun, like `elastic_job`.

    Only the second agent can leave, since the first hosts the rendezvous store.
    """
    output_dir = directory / "run"
    with free_ports(1) as [port]:
        endpoint = f"localhost:{port}"

    def agent(*, has_store: bool) -> list[object]:
        rendezvous = f"is_host={int(has_store)},last_call_timeout=3,keep_alive_interval=1"
        return [
            *("torchrun", "--nnodes", "1:2", "--nproc-per-node", NUM_RANKS // 2, "--max-restarts", 1_000_000),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "soak"),
            *("--rdzv-conf", rendezvous, "--local-addr", "127.0.0.1"),
            *("-m", program, *flags, "--output-dir", output_dir),
        ]

    with (
        closing(Follower(output_dir / FILE)) as follower,
        training(agent(has_store=True), output_dir, NUM_RANKS, environ=STORE) as job,
    ):
        second = [job.start(agent(has_store=False))]

        def leave(_host: str) -> Callable[[], None]:
            before = second.pop()
            job.processes.remove(before)
            before.send_signal(signal.SIGTERM)

            def come_back() -> None:
                before.wait(PATIENCE_SECONDS)
                second.append(job.start(agent(has_store=False)))

            return come_back

        yield ElasticJob(job, program, LOCAL, follower, leave=leave, can_leave=LOCAL.names[1:])
