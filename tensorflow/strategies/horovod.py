"""Horovod: one process a GPU or core, gradients averaged by all-reduce where the optimizer applies them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import horovod
import keras
import numpy as np
import tensorflow as tf
from horovod.common.elastic import notification_manager
from horovod.tensorflow import allreduce

from allstep.common.training.strategy import HorovodRanks
from allstep.tensorflow import horovod_keras as hvd
from allstep.tensorflow.models import trainable_names
from allstep.tensorflow.strategies.horovod_reduction import Bf16Sums, Sums
from allstep.tensorflow.strategies.reduction import Reduction
from allstep.tensorflow.strategies.strategy import Strategy


def _sum(tensor: tf.Tensor, name: str) -> tf.Tensor:
    """Return the sum of `tensor` over all ranks."""
    summed = allreduce(tensor, op=hvd.Sum, name=f"allstep.{name}", ignore_name_scope=True)
    return cast("tf.Tensor", summed)  # Horovod's annotations do not tell


@dataclass(frozen=True)
class HorovodExchange:
    """Exchange of the gradients of slices; see `ordered_sum.Exchange`."""

    keeps_order: bool
    in_graph = True

    def all_to_all(self, sent: tf.Tensor, received_sizes: Sequence[int]) -> tf.Tensor:
        return cast("tf.Tensor", hvd.alltoall(sent, name="allstep.slices"))  # without splits it gives no sizes

    def all_gather(self, part: tf.Tensor) -> tf.Tensor:
        return hvd.allgather(part, name="allstep.sum_of_slices")

    @tf.function(autograph=False)  # outside of a function TensorFlow gives operations names of its own
    def all_reduce(self, vector: tf.Tensor) -> tf.Tensor:
        return _sum(vector, "slices")


@dataclass(frozen=True)
class HorovodCollectives:
    """Collectives of Horovod's global process set."""

    rank: int
    world_size: int

    def all_reduce_sum(self, values: np.ndarray) -> np.ndarray:
        return np.asarray(hvd.allreduce(values, op=hvd.Sum, name="allstep.sum"))

    def all_gather(self, values: np.ndarray) -> np.ndarray:
        return np.asarray(hvd.allgather(values[np.newaxis], name="allstep.gather"))

    def broadcast_arrays(self, arrays: Mapping[str, np.ndarray], root: int = 0) -> dict[str, np.ndarray]:
        return {name: np.asarray(hvd.broadcast(array, root, name=f"allstep.{name}")) for name, array in arrays.items()}

    def barrier(self) -> None:
        self.all_reduce_sum(np.zeros(1))  # horovod.tensorflow has no barrier


class Horovod(HorovodRanks, Strategy):
    """The five steps in Horovod."""

    hvd, notifications, version = hvd, notification_manager, horovod.__version__
    collectives_of, exchange_of = HorovodCollectives, HorovodExchange
    init_options: ClassVar[Mapping[str, Any]] = {"stall_timeout": 0}  # the trainers' watch has a limit of its own

    def reduce(self, model: keras.Model, optimizer: keras.Optimizer) -> Reduction:
        if self.placement.world_size == 1:  # a single rank sends nothing
            return super().reduce(model, optimizer)
        compression = hvd.Compression.fp16 if self.flags.compression == "fp16" else hvd.Compression.none
        op = {"average": hvd.Average, "sum": hvd.Sum, "adasum": hvd.Adasum}[self.flags.op]
        optimizer = hvd.DistributedOptimizer(optimizer, compression=compression, op=op)
        sums = Bf16Sums if self.flags.compression == "bf16" else Sums
        reduction = sums(model, optimizer, self.compiled)
        reduction.divisor = self.placement.world_size if self.flags.op == "average" else 1
        reduction.names = trainable_names(model)  # they travel as a group, so all wait for all
        return reduction

    def broadcast(self, model: keras.Model, optimizer: keras.Optimizer) -> None:
        hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)

    def sum_over_ranks(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return _sum(tensor, name)
