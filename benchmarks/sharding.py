"""How fast and in how much memory the epoch's order comes, beside torch's DistributedSampler.

    python -m allstep.benchmarks.sharding [--num-samples 10000000,100000000,1000000000] [--world-size 1]

Each case runs in a process of its own, on one thread, as rank 0. Times are CPU times: other work on the
machine disturbs them little. DistributedSampler makes the order of all samples in every rank, as Python
integers; sizes for which the free memory does not suffice are left out. The exit status is 0 where the largest size has
at least 10 million indices a second in at most 1 MiB.
"""

from __future__ import annotations

import multiprocessing
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from allstep.common.base.flag_types import MAX_COUNT, Parser, listed, whole
from allstep.common.base.memory import available_memory
from allstep.common.data.sharding import rank_slice, sample_order
from allstep.common.process.exit import run_rank

MIN_INDICES_PER_SECOND, MAX_BYTES = 10_000_000, 2**20
POSITIONS_A_CALL = 1 << 13
# Enough of an epoch for a steady rate. DistributedSampler cannot make a part of one.
MEASURED_POSITIONS = 1 << 25
# A tensor of int64, a list of pointers and its slice for the rank, and an object for each int.
SAMPLER_BYTES_A_SAMPLE = 8 + 8 + 8 + 32


@dataclass(frozen=True)
class Cost:
    """What a rank pays to go through its samples."""

    first_seconds: float
    """CPU time to the first index."""
    indices_per_second: float
    """By CPU time, that to the first index included."""
    peak_bytes: int
    """Growth of the resident memory at its highest, the indices at hand included."""


def allstep_order(num_samples: int, world_size: int) -> Cost:
    """Call by call, as a data loader does; up to MEASURED_POSITIONS of the epoch."""
    sample_order(np.arange(1), 10**6, seed=0, epoch=0)  # NumPy's first calls are not measured
    begin, end = rank_slice(0, num_samples, rank=0, world_size=world_size)
    end = min(end, begin + MEASURED_POSITIONS)
    before, started = reset_peak(), time.process_time()
    sample_order(np.arange(1), num_samples, seed=0, epoch=1)
    first_seconds = time.process_time() - started
    for start in range(begin, end, POSITIONS_A_CALL):
        sample_order(np.arange(start, min(start + POSITIONS_A_CALL, end)), num_samples, seed=0, epoch=1)
    seconds = time.process_time() - started
    return Cost(first_seconds, (end - begin) / seconds, resident_bytes("VmHWM") - before)


def distributed_sampler(num_samples: int, world_size: int) -> Cost:
    """The whole epoch of one rank, consumed without a Python loop."""
    import torch
    from torch.utils.data import DistributedSampler

    torch.set_num_threads(1)
    torch.randperm(1000)
    samples: Any = range(num_samples)  # the sampler asks for the length alone
    sampler = DistributedSampler(samples, num_replicas=world_size, rank=0, seed=0)
    sampler.set_epoch(1)
    before, started = reset_peak(), time.process_time()
    indices = iter(sampler)
    next(indices)
    first_seconds = time.process_time() - started
    deque(indices, maxlen=0)
    seconds = time.process_time() - started
    return Cost(first_seconds, len(sampler) / seconds, resident_bytes("VmHWM") - before)


def reset_peak() -> int:
    """Let VmHWM start again from the present resident memory, in bytes (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes("VmRSS")


def resident_bytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def in_local_process(measure: Callable[[int, int], Cost], num_samples: int, world_size: int) -> Cost | None:
    """The cost, measured in a fresh process; None where the memory does not suffice."""
    if measure is distributed_sampler and num_samples * SAMPLER_BYTES_A_SAMPLE > available_memory():
        return None
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (num_samples, world_size))


def line(name: str, num_samples: int, cost: Cost | None) -> str:
    """One row of the table."""
    head = f"{num_samples:>13,}  {name:<18}"
    if cost is None:
        return f"{head} left out: needs {num_samples * SAMPLER_BYTES_A_SAMPLE / 2**30:.0f} GiB"
    rate, peak = cost.indices_per_second / 1e6, cost.peak_bytes / 2**20
    return f"{head} {cost.first_seconds * 1e3:>11,.1f} {rate:>19.1f} {peak:>11,.1f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table; end with status 1 where a target is missed."""
    parser = Parser("python -m allstep.benchmarks.sharding", __doc__)
    parser.add_argument("--num-samples", type=listed(whole(1, 2**40)), default=(10**7, 10**8, 10**9), metavar="N,...")
    parser.add_argument("--world-size", type=whole(1, MAX_COUNT), default=1, metavar="N")
    flags = parser.parse_args(argv)
    print("      samples  order               first in ms  million indices/s  peak in MiB")
    ours: dict[int, Cost] = {}
    for num_samples in flags.num_samples:
        cost = in_local_process(allstep_order, num_samples, flags.world_size)
        assert cost is not None  # its memory always suffices
        ours[num_samples] = cost
        print(line("allstep", num_samples, ours[num_samples]), flush=True)
        theirs = in_local_process(distributed_sampler, num_samples, flags.world_size)
        print(line("DistributedSampler", num_samples, theirs), flush=True)
    largest = ours[max(ours)]
    if largest.indices_per_second < MIN_INDICES_PER_SECOND or largest.peak_bytes > MAX_BYTES:
        sys.exit(1)


if __name__ == "__main__":
    run_rank(main)
