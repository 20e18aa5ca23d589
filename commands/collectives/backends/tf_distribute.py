"""tf.distribute.MultiWorkerMirroredStrategy, whose replica context has only all-reduce and all-gather."""

import os
from collections.abc import Callable

import numpy as np

from allstep.commands.collectives.backends import Operation, returning
from allstep.common.config.train_config import StrategyConfig
from allstep.common.launch.placement import find_placement
from allstep.common.process.lean_import import lean_import

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
with lean_import():
    import tensorflow as tf

    from allstep.tensorflow.strategies.multi_worker_mirrored import MultiWorkerMirrored


class TfDistribute:
    """Collectives in a replica context, in a graph, initialised as by the trainers' multi-worker-mirrored strategy."""

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
