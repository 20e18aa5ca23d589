"""Real all-reduce by MPI, on each host and across hosts, compared with the bandwidth of memory and network.

Ranks are this module run as a program; rank 0 prints a `Measurement` as JSON. Nothing is written.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from allstep.commands.doctor.finding import Finding, fault, ok, ranks, size, warning
from allstep.commands.doctor.launchers import find_mpirun
from allstep.commands.hosts.command import Host, to_list
from allstep.common.base.errors import quoted
from allstep.common.files import strict_json
from allstep.common.files.strict_json import Count, Positive, from_json, to_json

_SECONDS = 60
# Protocol overhead cannot explain a bus bandwidth below this share of the link's bandwidth.
_ENOUGH = 0.3
_SMALLEST, _FACTOR, _LARGEST = 2**16, 4, 2**26
_LONG_SECONDS = 0.1
_NUM_RUNS = 5


@dataclass(frozen=True)
class Measurement:
    """Measurement of an all-reduce by a few ranks."""

    num_ranks: Count
    num_bytes: Count
    """Size of the message."""
    seconds: Positive
    copy_bandwidth: Positive
    """Bytes per second of the slowest rank while all ranks of a host copy memory at the same time."""
    right: bool
    """Whether the result was correct."""

    @property
    def bus_bandwidth(self) -> float:
        """Bus bandwidth in bytes per second (nccl-tests, doc/PERFORMANCE.md): 2(n-1)/n S/t."""
        return 2 * (self.num_ranks - 1) / self.num_ranks * self.num_bytes / self.seconds


def measure(hosts: Sequence[Host]) -> Measurement | str:
    """Run an all-reduce over the slots of hosts; if it fails, return the reason in one line."""
    num_ranks = sum(host.slots for host in hosts)
    command = [find_mpirun() or "mpirun", "--allow-run-as-root", "--timeout", str(_SECONDS), "--bind-to", "none"]
    command += ["-np", str(num_ranks), "-H", to_list(hosts)]
    command += [sys.executable, "-m", "allstep.commands.doctor.all_reduce"]
    result = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)
    lines = result.stdout.splitlines()
    if result.returncode or not lines:
        said = [line for line in result.stderr.decode(errors="replace").splitlines() if line.strip(" -")]
        return quoted(said[0].strip()) if said else f"mpirun ended with status {result.returncode}"
    return from_json(Measurement, strict_json.loads(lines[-1]), "measurement")


def check_host(found: Measurement | str) -> Finding:
    """Check the all-reduce among the ranks of a host, whose link is memory."""
    if isinstance(found, str) or not found.right:
        return _failure(found, "on this host")
    link = f"a copy in memory has {size(found.copy_bandwidth)}/s"
    return ok("all-reduce", f"{ranks(found.num_ranks)}: {_bandwidth(found)} ({link})")


def check_across(found: Measurement | str, megabits: int) -> Finding:
    """Check the all-reduce with one rank per host; `megabits` is the network's speed in Mbit/s, 0 if not known."""
    if isinstance(found, str) or not found.right:
        return _failure(found, "across hosts")
    expected = megabits * 1e6 / 8
    text = f"{found.num_ranks} hosts: {_bandwidth(found)}"
    if not megabits:
        return ok("all-reduce", f"{text} (no interface says how fast it is)")
    beside = f"{text}, where the link should give {size(expected)}/s"
    if found.bus_bandwidth < _ENOUGH * expected:
        fix = "look at cables, switches and other traffic; name the fastest network by --network-interfaces"
        return warning("all-reduce", beside, fix)
    return ok("all-reduce", beside)


def _bandwidth(found: Measurement) -> str:
    return f"{size(found.bus_bandwidth)}/s of bus bandwidth, messages of {size(found.num_bytes)}"


def _failure(found: Measurement | str, where: str) -> Finding:
    if isinstance(found, str):
        return fault("all-reduce", f"fails {where}: {found}", "fix the faults above; try allstep collectives")
    return fault("all-reduce", f"gives a wrong sum {where}", "take the host out, and test its memory")


def run_rank() -> None:
    """Measure the all-reduce with growing messages until one takes long enough, and print the result on rank 0."""
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def median(run: Callable[[], Any]) -> float:
        """Return the median duration of several runs in seconds, on the slowest rank."""
        seconds = []
        for _ in range(_NUM_RUNS):
            world.Barrier()
            started = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - started)
        return world.allreduce(statistics.median(seconds), MPI.MAX)

    num_bytes = _SMALLEST
    while True:
        given = np.full(num_bytes // 4, world.rank + 1, np.float32)
        result = np.empty_like(given)
        seconds = median(lambda given=given, result=result: world.Allreduce(given, result))
        if seconds > _LONG_SECONDS or num_bytes >= _LARGEST:
            break
        num_bytes *= _FACTOR
    right = world.allreduce(bool((result == world.size * (world.size + 1) / 2).all()), MPI.LAND)
    copied = median(lambda: np.copyto(result, given))
    if world.rank == 0:
        print(json.dumps(to_json(Measurement(world.size, num_bytes, seconds, num_bytes / copied, right))))


if __name__ == "__main__":
    run_rank()
