"""Tools for custom TensorFlow training loops with Horovod; `pytorch/user_loop.py` has those for PyTorch.

from allstep.tensorflow import check_replicas, shard, watch
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from allstep.common.api import user_loop
from allstep.common.api.user_loop import Order, Shard, Steps
from allstep.common.base.collectives import Collectives, OneRank
from allstep.common.base.errors import UserError
from allstep.common.data.datasets.base import ArraySplit
from allstep.common.data.formats.python_file import as_split
from allstep.common.exact.replica_check import check_replicas_equal
from allstep.common.launch.unclaimed_ranks import current_ranks


def shard(samples: Any, global_batch_size: int, *, seed: int = 0, drop_last: bool = False) -> Shard:
    """Return this rank's batches, read by tf.data, in an order that is the same for any number of ranks.

    Shapes and types are those of the samples.

    Args:
        samples: inputs and targets as a pair of arrays, or an object with `__len__` and `read(indices, epoch)`.
        global_batch_size: samples per step over all ranks.
        drop_last: leave out the last samples of an epoch if they do not fill a global batch.

    Raises:
        UserError: there are no samples, or see `sharding.check` and `as_split`.
    """
    split: Any = as_split(samples, "the samples")
    arrays = getattr(samples, "tensors", samples)
    split = ArraySplit(*map(np.asarray, arrays)) if isinstance(split, ArraySplit) else split.samples

    def read_as_is(indices: np.ndarray, epoch: int) -> tuple[np.ndarray, ...]:
        return tuple(map(np.asarray, split.read(indices, epoch=epoch)))

    like = read_as_is(np.zeros(1, np.int64), 0)
    signature = tuple(tf.TensorSpec((None, *array.shape[1:]), array.dtype) for array in like)

    def read(indices: Iterator[np.ndarray]) -> Iterator[Any]:
        batches = list(indices)
        pipeline = tf.data.Dataset.from_generator(
            lambda: (read_as_is(batch, shards.position.epoch) for batch in batches), output_signature=signature
        )
        yield from pipeline.prefetch(tf.data.AUTOTUNE)

    shards = Shard(Order(len(split), global_batch_size, seed=seed, drop_last=drop_last), read)
    return shards


def watch(*, stall_timeout: float = 10.0, fault_timeout: float = 30.0) -> contextlib.AbstractContextManager[Steps]:
    """See `common.api.user_loop.watch`; call it after `hvd.init()`."""
    return user_loop.watch(_collectives(), stall_timeout=stall_timeout, fault_timeout=fault_timeout)


def check_replicas(model: keras.Model, moment: str = "") -> None:
    """Compare the weights of all ranks bit by bit; all ranks call it.

    Raises:
        Fault: weights differ; the message names the ranks and the first weight.
    """
    weights = ((variable.path, np.asarray(variable.value)) for variable in model.trainable_variables)
    check_replicas_equal(weights, _collectives(), moment or "where check_replicas is called")


def _collectives() -> Collectives:
    """Return the collectives of Horovod, which the program has initialised."""
    horovod = sys.modules.get("horovod.tensorflow")
    if horovod and horovod.is_initialized():
        from allstep.tensorflow.strategies.horovod import HorovodCollectives

        return HorovodCollectives(horovod.rank(), horovod.size())
    if current_ranks()[1] > 1:
        raise UserError("expected hvd.init() before, received none; call it")
    return OneRank()
