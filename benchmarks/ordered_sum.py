"""Seconds of Horovod's all-reduce and of the sum in fixed order, in turn, on ranks; rank 0 writes them as JSON.

    horovodrun -np 2 python -m allstep.benchmarks.ordered_sum pytorch 1,64 5 seconds.json

The arguments: framework, mebibytes of each vector, rounds, output.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from allstep.commands.shared.records.files import write_json
from allstep.common.base.memory import keep_freed_memory
from allstep.common.data.slices import local_nodes

_BYTES_A_ROUND = 64 * 2**20
"""So that a round of small vectors is long enough to be timed."""


def main(argv: Sequence[str] | None = None) -> None:
    """Time and write: by mebibytes, a pair of seconds a round."""
    framework, sizes, num_rounds, output = sys.argv[1:] if argv is None else argv
    keep_freed_memory()
    rank, operations = {"pytorch": _pytorch, "tensorflow": _tensorflow}[framework]()
    seconds: dict[str, list[tuple[float, float]]] = {}
    for size in sizes.split(","):
        calls = operations(np.ones(int(size) * 2**18, np.float32))
        num_calls = max(1, _BYTES_A_ROUND // (int(size) * 2**20))
        for call in calls:
            call()
        seconds[size] = [_timed(calls, num_calls) for _ in range(int(num_rounds))]
    if rank == 0:
        write_json(Path(output), seconds)


def _timed(calls: Sequence[Callable[[], object]], num_calls: int) -> tuple[float, float]:
    """The median call of each of two operations, which take turns call by call."""
    taken: tuple[list[float], list[float]] = [], []
    for _ in range(num_calls):
        for call, samples in zip(calls, taken, strict=True):
            started = time.perf_counter()
            call()
            samples.append(time.perf_counter() - started)
    return statistics.median(taken[0]), statistics.median(taken[1])


def _pytorch() -> tuple[int, Callable[[np.ndarray], Sequence[Callable[[], object]]]]:
    import horovod.torch as hvd
    import torch

    from allstep.pytorch.strategies.horovod import HorovodExchange
    from allstep.pytorch.strategies.ordered_sum import OrderedSum

    hvd.init()
    ordered_sum = OrderedSum(hvd.size(), hvd.rank(), hvd.size(), HorovodExchange(keeps_order=True))
    [node] = local_nodes(hvd.rank(), hvd.size(), hvd.size())

    def operations(array: np.ndarray) -> Sequence[Callable[[], object]]:
        vector = torch.from_numpy(array)
        return lambda: hvd.allreduce_(vector, op=hvd.Sum, name="all_reduce"), lambda: ordered_sum({node: vector})

    return hvd.rank(), operations


def _tensorflow() -> tuple[int, Callable[[np.ndarray], Sequence[Callable[[], object]]]]:
    import tensorflow as tf

    from allstep.tensorflow import horovod_keras as hvd
    from allstep.tensorflow.strategies.horovod import HorovodExchange
    from allstep.tensorflow.strategies.ordered_sum import OrderedSum

    hvd.init()
    ordered_sum = OrderedSum(hvd.size(), hvd.rank(), hvd.size(), HorovodExchange(keeps_order=True))
    [node] = local_nodes(hvd.rank(), hvd.size(), hvd.size())

    def operations(array: np.ndarray) -> Sequence[Callable[[], object]]:
        vector = tf.constant(array)
        return lambda: hvd.allreduce(vector, op=hvd.Sum, name="all_reduce"), lambda: ordered_sum({node: vector})

    return hvd.rank(), operations


if __name__ == "__main__":
    main()
