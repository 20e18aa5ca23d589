"""Horovod in TensorFlow, in a graph, as in a compiled training step."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from allstep.benchmarks.collective_backends import Operation
from allstep.common.quiet import lean_import

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
with lean_import():
    import horovod.tensorflow as hvd

    import tensorflow as tf


class HorovodTensorFlow:
    """Collectives of Horovod's global process set."""

    def __init__(self) -> None:
        hvd.init()
        self.rank, self.size = hvd.rank(), hvd.size()

    def all_reduce(self, array: np.ndarray) -> Operation:
        return _compiled(array, lambda buffer: hvd.allreduce(buffer, op=hvd.Sum, name="all_reduce"))

    def broadcast(self, array: np.ndarray) -> Operation:
        return _compiled(array, lambda buffer: hvd.broadcast(buffer, 0, name="broadcast"))

    def all_gather(self, array: np.ndarray) -> Operation:
        return _compiled(array, lambda buffer: hvd.allgather(buffer, name="all_gather"))

    def reduce_scatter(self, array: np.ndarray) -> Operation:
        return _compiled(array, lambda buffer: hvd.reducescatter(buffer, op=hvd.Sum, name="reduce_scatter"))

    def all_to_all(self, array: np.ndarray) -> Operation:
        return _compiled(array, lambda buffer: hvd.alltoall(buffer, name="all_to_all"))


def _compiled(array: np.ndarray, call: Callable[[tf.Tensor], tf.Tensor]) -> Operation:
    """The operation of a call, in a graph that is traced at its first run."""
    buffer, last = tf.constant(array), []
    compiled = tf.function(call)

    def run() -> None:
        last[:] = [compiled(buffer)]

    return Operation(run, lambda: last[0].numpy())
