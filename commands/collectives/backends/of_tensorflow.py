"""Collectives in TensorFlow, in a graph as in a compiled training step: those of Horovod, and of tf.distribute."""

import os
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from allstep.commands.collectives.backends import Operation, returning
from allstep.common.config.train_config import StrategyConfig
from allstep.common.launch.placement import find_placement
from allstep.common.process.lean_import import lean_import

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
with lean_import():
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from allstep.tensorflow.strategies.horovod import Horovod
    from allstep.tensorflow.strategies.multi_worker_mirrored import MultiWorkerMirrored


_CHAINED_BYTES = 2**31
"""Limit of the bytes that one graph reduces. As in a training step, a graph has many all-reduces, because calling it
takes longer than MPI takes to reduce a MiB. All but the first are in place, like those of gradients."""


class HorovodTensorFlow:
    """Collectives of Horovod's global process set, with the threads of a trainer's rank."""

    def __init__(self) -> None:
        strategy = Horovod(find_placement(), StrategyConfig())
        strategy.init()
        strategy.pin_device()
        self.rank, self.size = hvd.rank(), hvd.size()

    def all_reduce(self, array: np.ndarray) -> Operation:
        # Each all-reduce after the first multiplies by the number of ranks; a float32 holds up to 2**127.
        length = min(96 // self.size.bit_length(), max(1, _CHAINED_BYTES // array.nbytes))

        def chain(buffer: tf.Tensor) -> tf.Tensor:
            for number in range(length):
                buffer = cast("tf.Tensor", hvd.allreduce(buffer, op=hvd.Sum, name=f"all_reduce_{number}"))
            return buffer

        operation = _compiled(array, chain)

        def result() -> np.ndarray:
            # The first all-reduce adds whole numbers exactly; the others may round.
            sums = operation.result() / np.float32(self.size) ** (length - 1)
            whole = np.rint(sums)
            return np.where(np.isclose(sums, whole, rtol=length * np.finfo(np.float32).eps, atol=0), whole, sums)

        return Operation(operation.run, result, length)

    def broadcast(self, array: np.ndarray) -> Operation:
        return _compiled(array, lambda buffer: hvd.broadcast(buffer, 0, name="broadcast"))

    def all_gather(self, array: np.ndarray) -> Operation:
        return _compiled(array, lambda buffer: hvd.allgather(buffer, name="all_gather"))

    def reduce_scatter(self, array: np.ndarray) -> Operation:
        return _compiled(array, lambda buffer: hvd.reducescatter(buffer, op=hvd.Sum, name="reduce_scatter"))

    def all_to_all(self, array: np.ndarray) -> Operation:
        return _compiled(array, lambda buffer: hvd.alltoall(buffer, name="all_to_all"))


def _compiled(array: np.ndarray, call: Callable[[tf.Tensor], Any]) -> Operation:
    """Return the operation of a call, in a graph that is traced at its first run."""
    buffer, compiled = tf.constant(array), tf.function(call)
    return returning(lambda: compiled(buffer))


class TfDistribute:
    """Collectives in a replica context, which has only two, initialised as by the multi-worker-mirrored strategy."""

    def __init__(self) -> None:
        strategy = MultiWorkerMirrored(find_placement(), StrategyConfig())
        strategy.init()
        strategy.pin_device()
        self._tf_strategy = strategy.strategy
        self.rank, self.size = strategy.collectives.rank, strategy.collectives.world_size

    def all_reduce(self, array: np.ndarray) -> Operation:
        return self._compiled(array, lambda context, buffer: context.all_reduce(tf.distribute.ReduceOp.SUM, buffer))

    def all_gather(self, array: np.ndarray) -> Operation:
        return self._compiled(array, lambda context, buffer: context.all_gather(buffer, axis=0))

    def _compiled(self, array: np.ndarray, call: Callable) -> Operation:
        buffer = tf.constant(array)

        def on_device(value: tf.Tensor) -> tf.Tensor:
            # TensorFlow asks a value for its device, and only values made in the replica have one.
            return call(tf.distribute.get_replica_context(), tf.identity(value))

        @tf.function
        def compiled(value: tf.Tensor) -> tf.Tensor:
            return self._tf_strategy.run(on_device, (value,))

        return returning(lambda: compiled(buffer))
