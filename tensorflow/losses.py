"""The losses and metrics by name; `pytorch/losses.py` has the same ones.

Each takes outputs and targets, (n, ...), and returns a sum over the n samples of what is a mean over the other axes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import tensorflow as tf

from allstep.common.catalog import user_file
from allstep.common.catalog.losses import wrong_loss

Measure = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def build_loss(name: str, label_smoothing: float = 0.0) -> Measure:
    """A loss of `common.catalog.losses.LOSSES`, or the function of the user's that FILE.py:FUNCTION names."""
    if file := user_file.parse(name):
        return partial(_users, user_file.import_for("tensorflow", *file, "--loss"))
    losses = partial(_cross_entropy, label_smoothing=label_smoothing) if name == "cross-entropy" else _LOSSES[name]
    return partial(_sum_over_samples, losses)


def build_metric(name: str, loss: str) -> Measure:
    """A metric of `common.catalog.losses.metric_of`."""
    measured = _mae if name == "mae" else _has_right_sign if loss == "bce" else _is_right_class
    return partial(_sum_over_samples, measured)


def _cross_entropy(outputs: tf.Tensor, targets: tf.Tensor, label_smoothing: float) -> tf.Tensor:
    """Of logits (n, ..., classes) and classes (n, ...), or shares of the classes (n, classes)."""
    if targets.dtype.is_floating:
        losses = tf.nn.softmax_cross_entropy_with_logits(labels=targets, logits=outputs)
    else:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=outputs)
    if label_smoothing:
        uniform = -tf.reduce_mean(tf.nn.log_softmax(outputs), axis=-1)
        losses = (1 - label_smoothing) * losses + label_smoothing * uniform
    return losses


def _users(function: Measure, outputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    """Of a function that returns the mean over all samples, or the losses of each sample."""
    losses = user_file.call(function, tf.cast(outputs, tf.float32), targets, flag="--loss")
    if not isinstance(losses, tf.Tensor) or tuple(losses.shape[:1]) not in ((), tuple(targets.shape[:1])):
        raise wrong_loss(function, getattr(losses, "shape", losses))
    return tf.reduce_mean(losses) * tf.cast(tf.shape(targets)[0], tf.float32)


def _sum_over_samples(measure: Measure, outputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    measured = measure(tf.cast(outputs, tf.float32), targets)
    num_elements = cast("int", measured.shape[1:].num_elements())  # of a sample, which is known
    return tf.reduce_sum(measured) / num_elements


def _is_right_class(outputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.argmax(outputs, -1) == targets, tf.float32)


def _has_right_sign(outputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    return tf.cast((outputs > 0) == (targets > 0.5), tf.float32)


def _mse(outputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    return tf.math.squared_difference(outputs, targets)


def _mae(outputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    return tf.abs(outputs - targets)


def _huber(outputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    """Quadratic up to a difference of 1, linear from there (Huber 1964)."""
    apart = _mae(outputs, targets)
    return tf.where(apart < 1, tf.square(apart) / 2, apart - 0.5)


def _bce(outputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    return tf.nn.sigmoid_cross_entropy_with_logits(labels=targets, logits=outputs)


_LOSSES: dict[str, Measure] = {"mse": _mse, "mae": _mae, "huber": _huber, "bce": _bce}
