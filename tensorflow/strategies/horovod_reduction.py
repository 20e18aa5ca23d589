"""Horovod's reductions of gradients: all together, by all-reduce (or Adasum) of its optimizer, or in bfloat16."""

from collections.abc import Sequence
from typing import cast

import tensorflow as tf

from allstep.tensorflow import horovod_keras as hvd
from allstep.tensorflow.drop_in.optimizer import Distributed
from allstep.tensorflow.passes import Gradients, on_present
from allstep.tensorflow.strategies.reduction import Reduction


class Sums(Reduction):
    """The two halves of `apply` of Horovod's DistributedOptimizer: reduce gradients, and apply the result."""

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


class Bf16Sums(Sums):
    """--compression bf16: all gradients together, after the backward pass."""

    def __call__(self, gradients: Gradients) -> Gradients:
        return on_present(lambda present: _bf16_sums(present, self.divisor), gradients)


def bf16_sum(vector: tf.Tensor, divisor: float) -> tf.Tensor:
    """Return the float32 sum of the ranks' vectors (n,) over `divisor`, as `pytorch/strategies/` does."""
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
