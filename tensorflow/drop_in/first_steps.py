"""Checks in the first steps: do all ranks have the weights of rank 0, and is the loss a mean over samples?

In loops that a user writes (train_on_batch, apply_gradients), weights are compared when gradients are reduced for the
second time: Horovod's examples broadcast weights after the first step, when the optimizer has its slots.

A `fit` tries on its first batch whether half of it weighs each sample double. If not, as with sums, masks, or samples
that are compared, the ranks' averages are not the gradients of the whole batch.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from horovod.tensorflow.mpi_ops import ProcessSet

from allstep.common.base.errors import note, summary
from allstep.common.exact.replica_check import DROP_IN_CHECK, OUT_OF_STEP, digest
from allstep.tensorflow.compat import is_in_xla, layers_of
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


def is_guarded() -> bool:
    """Return whether such a `fit` runs."""
    return bool(_guarded)


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


@functools.cache
def is_due() -> tf.Variable:
    """Return the variable that is true from the start of a `fit` on several ranks until its first batch."""
    with tf.init_scope(), tf.device("/cpu:0"):
        return tf.Variable(tf.constant(False), trainable=False)


def checked(model: keras.Model, data: Any) -> Any:
    """Return the `data` of a training step, which waits for the check if it is due."""
    inputs = keras.tree.flatten(getattr(model, "inputs", None) or [])
    tensors = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
    is_average = getattr(getattr(model.optimizer, "_reduction", None), "op", None) == hvd.Average and hvd.size() > 1
    has_size = any(one.shape[0] for one in inputs) or any(getattr(one, "stateful", False) for one in layers_of(model))
    if not is_average or has_size or is_in_xla() or not all(isinstance(one, tf.Tensor) for one in tensors):
        return data

    # TensorFlow keeps what a function in a graph refers to, and so would never free the model.
    of, like = weakref.ref(model), tf.nest.map_structure(lambda leaf: leaf is not None, data)

    def check(*values: tf.Tensor) -> bool:
        if is_due() and (model := of()) is not None:
            is_due().assign(False)
            given = iter(values)
            leaves = [next(given) if is_there else None for is_there in tf.nest.flatten(like)]
            try:
                # Keras computes regularizers from what the scope has.
                weights = [(one, one.value) for one in model.trainable_variables]
                with keras.StatelessScope(weights, collect_losses=True):
                    is_mean = has_mean_loss(model, like, leaves, len(values[0]))
                if not is_mean and hvd.rank() == 0:
                    note(_NO_MEAN)
            except Exception as error:  # such as of a loss for whole batches alone
                if hvd.rank() == 0:
                    note(f"the loss of this model is not tried on a part of a batch: {summary(error)}")
        return True

    with tf.control_dependencies(call_if(is_due(), check, lambda: tensors)):
        return tf.nest.map_structure(lambda leaf: None if leaf is None else tf.identity(leaf), data)


def has_mean_loss(model: keras.Model, like: Any, leaves: list[tf.Tensor | None], size: int) -> bool:
    """Return whether half of a batch has its own outputs, and a loss in which its samples weigh double."""
    half = size // 2

    def unpacked(start: int, stop: int) -> tuple:
        part = [None if leaf is None else leaf[start:stop] for leaf in leaves]
        return keras.utils.unpack_x_y_sample_weight(tf.nest.pack_sequence_as(like, part))

    def passed(start: int, stop: int) -> tuple[Any, list[np.ndarray]]:
        outputs: Any = model(unpacked(start, stop)[0], training=False)
        return outputs, [tf.reduce_sum(tf.cast(one, tf.float32)).numpy() for one in model.losses]

    if not half:
        return True
    (outputs, added), (first, first_added) = passed(0, 2 * half), passed(0, half)
    flat, weights = tf.nest.flatten(outputs), []
    pairs = [(one[:half], other) for one, other in zip(flat, tf.nest.flatten(first), strict=True)]
    if added:  # what layers add as a mean is the mean of those of two halves
        _, second_added = passed(half, 2 * half)
        pairs += zip(added, np.add(first_added, second_added) / 2, strict=True)
    is_rounded = tf.config.list_logical_devices("GPU") or any(map(_is_in_16_bits, layers_of(model)))  # GPUs: TF32
    is_alike = functools.partial(_is_alike, bound=3e-2 if is_rounded else 1e-4)
    if not all(map(is_alike, pairs)):
        again = tf.nest.flatten(passed(0, half))
        if all(map(is_alike, zip(tf.nest.flatten([first, first_added]), again, strict=True))):
            return False  # else layers draw random numbers
    for one in flat:  # Keras would take the gradient of what comes before a softmax or sigmoid
        vars(one).pop("_keras_logits", None)
    for count, own in ((2 * half, flat), (half, [one[:half] for one in flat])):  # a part has no mask
        x, y, sample_weight = unpacked(0, count)
        with tf.GradientTape() as tape:
            tape.watch(own)
            y_pred = tf.nest.pack_sequence_as(outputs, own)
            loss: Any = model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)
        found = [tf.convert_to_tensor(one)[:half] for one in tape.gradient(loss, own) if one is not None]
        weights.append(count * sum(float(tf.norm(tf.cast(one, tf.float32))) for one in found))
    return bool(np.isclose(*weights, rtol=1e-3, equal_nan=True))


def _is_in_16_bits(layer: keras.Layer) -> bool:
    return "float16" in (layer.compute_dtype or "")


def _is_alike(pair: tuple[Any, Any], bound: float) -> bool:
    one, other = (np.asarray(value, np.float32) for value in pair)
    if one.shape != other.shape or not one.size:  # has another first axis than that of samples
        return True
    return bool(np.abs(one - other).max() <= bound * np.abs(one).max())


_NO_MEAN = (
    "the loss of this model is not a mean over samples (but a sum, or has a mask, divides weights by their sum, or "
    "compares samples), so the average over ranks is not that of the whole batch; for a sum give "
    "hvd.DistributedOptimizer(op=hvd.Sum), or its mean to add_loss, for a mask sample_weight"
)
