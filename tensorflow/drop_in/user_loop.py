"""Check of loops that a user writes (train_on_batch, apply_gradients): all ranks have the weights of rank 0.

Horovod's examples broadcast weights after the first step, when the optimizer has its slots, so weights are compared
when gradients are reduced for the second time.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow.mpi_ops import ProcessSet

from allstep.common.exact.replica_check import DROP_IN_CHECK, OUT_OF_STEP, digest
from allstep.tensorflow.drop_in.collectives import native

_guarded: list[None] = []


@contextlib.contextmanager
def leave_to_guard() -> Iterator[None]:
    """Compare nothing here while a `fit` runs that compares more."""
    _guarded.append(None)
    try:
        yield
    finally:
        _guarded.pop()


class SecondStep:
    """Comparison of weights over ranks before the second step of an optimizer."""

    def __init__(self) -> None:
        self._count: tf.Variable | None = None

    def compare(self, variables: Sequence[Any], process_set: ProcessSet, name: str) -> list[tf.Tensor]:
        """Count a step, and compare `variables` if it is the second; return what is to wait for in a graph.

        Raises RuntimeError, in a graph a `tf.errors.OpError` with its line, if ranks have other values.
        """
        if _guarded or not variables:
            return []
        if self._count is None:
            with tf.init_scope(), tf.device("/cpu:0"):
                self._count = tf.Variable(tf.constant(0, tf.int64), trainable=False)
        names = [getattr(variable, "path", variable.name) for variable in variables]

        def check(*values: tf.Tensor) -> bool:
            codes = tf.constant([[digest(value.numpy()) for value in values]], tf.int64)
            every = hvd.allgather(codes, name=f"{DROP_IN_CHECK}.{name}", process_set=process_set).numpy()
            if (differs := every != every[0]).any():
                first = names[int(np.flatnonzero(differs.any(axis=0))[0])]
                ranks = ", ".join(map(str, np.flatnonzero(differs.any(axis=1))))
                raise RuntimeError(
                    f"{OUT_OF_STEP} before the second step; received others on rank {ranks} than on rank 0, first in "
                    f"{first}. Send those of rank 0 before training or after its first step: "
                    "hvd.broadcast_variables(model.variables, root_rank=0), and the optimizer's variables alike."
                )
            return True

        count = self._count.assign_add(1)
        return call_if(tf.equal(count, 2), check, lambda: list(map(_value, variables)))


def call_if(is_due: Any, check: Callable[..., bool], values: Callable[[], Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    """Call `check` with `values` where a tensor is true; return what is to wait for in a graph."""
    if not tf.executing_eagerly():
        return [tf.cond(is_due, lambda: tf.py_function(check, values(), tf.bool), lambda: tf.constant(True))]
    if is_due:
        check(*values())
    return []


def _value(variable: Any) -> tf.Tensor:
    return tf.convert_to_tensor(native(variable))
