"""One rank of the doctor's all-reduce by MPI, with growing messages until one takes long enough to be measured.

mpirun -np 2 python -m allstep.commands.doctor.all_reduce_rank

Rank 0 prints an `all_reduce.Measurement` as JSON. Nothing is written.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from allstep.commands.doctor.all_reduce import Measurement
from allstep.common.files.records import to_json

_SMALLEST, _FACTOR, _LARGEST = 2**16, 4, 2**26
_LONG_SECONDS = 0.1
_NUM_RUNS = 5


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the all-reduce, and print the result on rank 0."""
    world = MPI.COMM_WORLD
    num_bytes = _SMALLEST
    while True:
        given = np.full(num_bytes // 4, world.rank + 1, np.float32)
        result = np.empty_like(given)
        seconds = _median(lambda given=given, result=result: world.Allreduce(given, result), world)
        if seconds > _LONG_SECONDS or num_bytes >= _LARGEST:
            break
        num_bytes *= _FACTOR
    right = world.allreduce(bool((result == world.size * (world.size + 1) / 2).all()), MPI.LAND)
    copied = _median(lambda: np.copyto(result, given), world)
    if world.rank == 0:
        print(json.dumps(to_json(Measurement(world.size, num_bytes, seconds, num_bytes / copied, right))))


def _median(run: Callable[[], object], world: MPI.Comm) -> float:
    """Return the median duration of several runs in seconds, on the slowest rank."""
    seconds = []
    for _ in range(_NUM_RUNS):
        world.Barrier()
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return world.allreduce(statistics.median(seconds), MPI.MAX)


if __name__ == "__main__":
    main()
