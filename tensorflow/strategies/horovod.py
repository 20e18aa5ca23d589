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

from allstep.common.training.horovod_ranks import HorovodRanks
from allstep.tensorflow import horovod_keras as hvd
from allstep.tensorflow.drop_in.optimizer import Distributed
from allstep.tensorflow.models import trainable_names
from allstep.tensorflow.passes import Gradients, on_present
from allstep.tensorflow.strategies.reduction import Reduction
from allstep.tensorflow.strategies.strategy import Strategy


def _sum(tensor: tf.Tensor, name: str) -> tf.Tensor:
    """Return the sum of `tensor` over all ranks."""
    summed = allreduce(tensor, op=hvd.Sum, name=f"allstep.{name}", ignore_name_scope=True)
    return cast("tf.Tensor", summed)  # of tensors Horovod makes tensors, though it does not say so


@dataclass(frozen=True)
class HorovodExchange:
    """Exchanges the gradients of slices; see `ordered_sum.Exchange`."""

    keeps_order: bool
    """See `ordered_sum.Exchange`."""
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
        sums = _Bf16Sums if self.flags.compression == "bf16" else _AllReduces
        reduction = sums(model, optimizer, self.compiled)
        reduction.divisor = self.placement.world_size if self.flags.op == "average" else 1
        reduction.names = trainable_names(model)  # they travel as a group, so all wait for all
        return reduction

    def broadcast(self, model: keras.Model, optimizer: keras.Optimizer) -> None:
        hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)

    def sum_over_ranks(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return _sum(tensor, name)


class _AllReduces(Reduction):
    """The two halves of `apply` of Horovod's DistributedOptimizer: reduce gradients, and apply what comes of it."""

    optimizer: Distributed
    names: Sequence[str]
    divisor: int
    """Divisor of sums of gradients, for reductions that do not leave it to Horovod."""

    def __call__(self, gradients: Gradients) -> Gradients:
        return self.optimizer.reduce(gradients, self._variables)

    def apply(self, gradients: Gradients) -> None:
        self._apply(self.optimizer.apply_reduced, gradients)

    def pending_tensors(self) -> Sequence[str]:
        return self.names


class _Bf16Sums(_AllReduces):
    """--compression bf16: all gradients together, after the backward pass."""

    def __call__(self, gradients: Gradients) -> Gradients:
        return on_present(lambda present: _bf16_sums(present, self.divisor), gradients)


def bf16_sum(vector: tf.Tensor, divisor: float) -> tf.Tensor:
    """Return the float32 sum of the ranks' vectors (n,) over `divisor`, as `pytorch/strategies/horovod.py` does."""
    size, world_size = cast("int", vector.shape[0]), hvd.size()
    padded = tf.pad(tf.cast(vector, tf.bfloat16), [[0, -size % world_size]])
    parts = hvd.alltoall(tf.reshape(tf.bitcast(padded, tf.uint8), [-1]), name="allstep.bf16_parts")
    rows = tf.reshape(_as_bf16(cast("tf.Tensor", parts)), [world_size, -1])
    own = tf.reduce_sum(tf.cast(rows, tf.float32), axis=0) / divisor
    sent = tf.reshape(tf.bitcast(tf.cast(own, tf.bfloat16), tf.uint8), [-1])
    whole = hvd.allgather(sent, name="allstep.bf16_sums")
    return tf.cast(_as_bf16(whole)[:size], tf.float32)


def _as_bf16(received: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(tf.reshape(received, [-1, 2]), tf.bfloat16)


def _bf16_sums(gradients: Sequence[tf.Tensor], divisor: float) -> list[tf.Tensor]:
    """Return the sums of gradients over ranks, divided by `divisor`; all of them travel together."""
    dense = [tf.convert_to_tensor(one) for one in gradients]
    sizes = [cast("int", one.shape.num_elements()) for one in dense]
    summed = bf16_sum(tf.concat([tf.reshape(one, [-1]) for one in dense], axis=0), divisor)
    return [tf.reshape(part, one.shape) for part, one in zip(tf.split(summed, sizes), dense, strict=True)]
