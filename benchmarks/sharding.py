"""Compare speed and memory of computing an epoch's order with those of torch's DistributedSampler.

    python -m allstep.benchmarks.sharding [--num-samples 10000000,100000000,1000000000] [--world-size 1]

Each case runs in a separate process, on one thread, as rank 0. Times are CPU times, which other work on the machine
hardly affects. DistributedSampler creates the order of all samples on every rank, as Python integers; sizes for which
the free memory does not suffice are left out. The exit status is 0 if ours yields at least 10 million indices per
second in at most 1 MiB for the largest size.
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
# Enough of an epoch for a steady rate. DistributedSampler can only create a whole epoch.
MEASURED_POSITIONS = 1 << 25
# A tensor of int64, a list of pointers and its slice for the rank, and an object for each int.
SAMPLER_BYTES_A_SAMPLE = 8 + 8 + 8 + 32


@dataclass(frozen=True)
class Cost:
    """Cost of iterating over the indices of a rank."""

    first_seconds: float
    """CPU time to the first index."""
    indices_per_second: float
    """Rate by CPU time, including the time to the first index."""
    peak_bytes: int
    """Largest growth of the resident memory, including the current indices."""


def allstep_order(num_samples: int, world_size: int) -> Cost:
    """Measure our order call by call, as a data loader does, for up to MEASURED_POSITIONS of the epoch."""
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
    """Measure DistributedSampler over the whole epoch of one rank, consumed without a Python loop."""
    import torch
    from torch.utils.data import DistributedSampler

    torch.set_num_threads(1)
    torch.randperm(1000)
    samples: Any = range(num_samples)  # the sampler only asks for the length
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
    """Reset VmHWM to the present resident memory (proc(5), clear_refs), and return that in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes("VmRSS")


def resident_bytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def in_fresh_process(measure: Callable[[int, int], Cost], num_samples: int, world_size: int) -> Cost | None:
    """Measure the cost in a fresh process; return None if the memory does not suffice."""
    if measure is distributed_sampler and num_samples * SAMPLER_BYTES_A_SAMPLE > available_memory():
        return None
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (num_samples, world_size))


def line(name: str, num_samples: int, cost: Cost | None) -> str:
    """Return one row of the table."""
    head = f"{num_samples:>13,}  {name:<18}"
    if cost is None:
        return f"{head} left out: needs {num_samples * SAMPLER_BYTES_A_SAMPLE / 2**30:.0f} GiB"
    rate, peak = cost.indices_per_second / 1e6, cost.peak_bytes / 2**20
    return f"{head} {cost.first_seconds * 1e3:>11,.1f} {rate:>19.1f} {peak:>11,.1f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table; exit with status 1 if a target is missed."""
    parser = Parser("python -m allstep.benchmarks.sharding", __doc__)
    parser.add_argument("--num-samples", type=listed(whole(1, 2**40)), default=(10**7, 10**8, 10**9), metavar="N,...")
    parser.add_argument("--world-size", type=whole(1, MAX_COUNT), default=1, metavar="N")
    flags = parser.parse_args(argv)
    print("      samples  order               first in ms  million indices/s  peak in MiB")
    ours: dict[int, Cost] = {}
    for num_samples in flags.num_samples:
        cost = in_fresh_process(allstep_order, num_samples, flags.world_size)
        assert cost is not None  # its memory always suffices
        ours[num_samples] = cost
        print(line("allstep", num_samples, ours[num_samples]), flush=True)
        theirs = in_fresh_process(distributed_sampler, num_samples, flags.world_size)
        print(line("DistributedSampler", num_samples, theirs), flush=True)
    largest = ours[max(ours)]
    if largest.indices_per_second < MIN_INDICES_PER_SECOND or largest.peak_bytes > MAX_BYTES:
        sys.exit(1)


if __name__ == "__main__":
    run_rank(main)
