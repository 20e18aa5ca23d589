"""One rank of `allstep collectives`: runs each collective at each size, checks it, times it, and writes what it saw.

mpirun -np 2 python -m allstep.commands.collectives.backends.worker mpi4py all-reduce 8,1048576 DIRECTORY
"""

import functools
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from allstep.commands.collectives.backends import Operation, create
from allstep.commands.shared.records.collectives import RankResult, RankRow
from allstep.commands.shared.records.files import write_json
from allstep.common.process.exit import run_rank

_PASSES = 3
"""Number of times that each size is timed, seconds apart, because disturbances of a machine come and go."""
_PERIOD = 13
"""Number of elements after which inputs repeat: prime, so that a displaced block is noticed."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure a library's collectives, at sizes in bytes, and write the results into a directory."""
    name, collectives, sizes, directory = sys.argv[1:] if argv is None else argv
    measure(create(name), collectives.split(","), [int(size) for size in sizes.split(",")], Path(directory))


def measure(backend: Any, collectives: Sequence[str], sizes: Sequence[int], directory: Path) -> None:
    """Write rank-R.json to the directory: rows, each with its seconds by pass, and the missing collectives."""
    rows: list[RankRow] = []
    missing = []
    for collective in collectives:
        make = getattr(backend, collective.replace("-", "_"), None)
        if make is None:
            missing.append(collective)
            continue
        operations, checks = [], []
        for size in sizes:
            count = num_elements(size, backend.size)
            operation = make(given(collective, count, backend.rank, backend.size))
            operation.run()
            is_right = np.array_equal(operation.result(), expected(collective, count, backend.rank, backend.size))
            checks.append((4 * count, bool(is_right)))
            operations.append((operation, num_runs(size, operation.times)))
        passes = [[_time(operation, runs) for operation, runs in operations] for _ in range(_PASSES)]
        for (num_bytes, right), seconds in zip(checks, zip(*passes, strict=True), strict=True):
            rows.append(RankRow(collective, num_bytes, right, seconds))
    write_json(directory / f"rank-{backend.rank}.json", RankResult(tuple(rows), tuple(missing)))


def num_elements(num_bytes: int, num_ranks: int) -> int:
    """Return the elements of a message of about `num_bytes` that divide evenly among the ranks."""
    return max(1, num_bytes // 4 // num_ranks) * num_ranks


def num_runs(num_bytes: int, times: int = 1) -> int:
    """Return the timed runs of a size in a pass, the same on all ranks; each run moves the data `times` times.

    Runs of large messages take longer, and other work on the core changes their times by a smaller share.
    """
    runs = 15 if num_bytes <= 2**16 else 9 if num_bytes <= 2**22 else 3 if num_bytes <= 2**25 else 1
    return max(min(runs, 3), runs // times)


def given(collective: str, count: int, rank: int, num_ranks: int) -> np.ndarray:
    """Return a rank's input for a message of `count` elements: whole numbers, so that sums are exact in any order."""
    return _values(rank, count // num_ranks if collective == "all-gather" else count)


def expected(collective: str, count: int, rank: int, num_ranks: int) -> np.ndarray:
    """Return the correct result of a collective on a rank."""
    part = count // num_ranks
    own = slice(rank * part, (rank + 1) * part)
    # One at a time: all of them together would fill the memory if messages are large and ranks are many.
    inputs = (given(collective, count, other, num_ranks) for other in range(num_ranks))
    if collective in ("all-reduce", "reduce-scatter"):
        total = functools.reduce(np.add, inputs)
        return total if collective == "all-reduce" else total[own]
    if collective == "all-to-all":
        return np.concatenate([array[own].copy() for array in inputs])
    if collective == "all-gather":
        return np.concatenate(list(inputs))
    return given(collective, count, 0 if collective == "broadcast" else rank, num_ranks)


def _values(rank: int, count: int) -> np.ndarray:
    """Return copies of one period: computing 256 MiB element by element takes longer than reducing them."""
    period = np.arange(_PERIOD, dtype=np.float32) + (_PERIOD * rank + 1)
    return np.tile(period, -(-count // _PERIOD))[:count]


def _time(operation: Operation, runs: int) -> float:
    """Return the seconds of one collective: the median of several runs in a row, after warm-up runs.

    nccl-tests takes the mean; the median drops runs during which another process used the core.
    """
    seconds = []
    for _ in range(max(1, runs // 5) + runs):
        started = time.perf_counter()
        operation.run()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[-runs:]) / operation.times


if __name__ == "__main__":
    run_rank(main)
