"""Losses by name; `pytorch/losses.py` has the same ones.

Each takes outputs and targets, (n, ...), and returns the sum over the n samples of the mean over all other axes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import keras
import numpy as np
import tensorflow as tf

from allstep.common.base.errors import UserError
from allstep.common.catalog import user_file
from allstep.common.catalog.losses import wrong_loss
from allstep.common.catalog.user_file import name_of

Measure = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
"""Takes outputs and targets, and returns a sum over the samples."""


def build_loss(name: str, label_smoothing: float = 0.0, class_weights: Sequence[float] = ()) -> Measure:
    """Return a loss of `common.catalog.losses.LOSSES`, or the user's function that FILE.py:FUNCTION names.

    `class_weights` are factors of the terms of the cross-entropy, which stays a mean over samples.
    """
    if (function := user_file.loss_for("tensorflow", name)) is not None:
        _check(function)
        return partial(_users, _targets_last(function))
    losses = partial(_cross_entropy, label_smoothing=label_smoothing) if name == "cross-entropy" else _LOSSES[name]
    if class_weights:
        losses = partial(_weighted_cross_entropy, label_smoothing=label_smoothing, class_weights=class_weights)
    return partial(_sum_over_samples, losses)


def measure_of(name: str) -> Callable[[np.ndarray, np.ndarray], float]:
    """Return a function of arrays: a user's loss of outputs and targets, times the number of samples."""
    loss = build_loss(name)
    return lambda outputs, targets: float(loss(tf.constant(outputs), tf.constant(targets)))


def scores(outputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    """Return what metrics need of outputs (..., classes), float32 (..., 3): see `common.training.metrics.Scores`."""
    outputs, targets = tf.cast(outputs, tf.float32), tf.expand_dims(tf.cast(targets, tf.int64), -1)
    own = tf.gather(outputs, targets, batch_dims=len(targets.shape) - 1)
    before = tf.range(tf.shape(outputs, tf.int64)[-1]) < targets
    rank = tf.math.count_nonzero((outputs > own) | ((outputs == own) & before), axis=-1)
    columns = tf.argmax(outputs, axis=-1), rank, tf.squeeze(own, -1) - tf.reduce_logsumexp(outputs, axis=-1)
    return tf.stack([tf.cast(column, tf.float32) for column in columns], axis=-1)


def _cross_entropy(outputs: tf.Tensor, targets: tf.Tensor, label_smoothing: float) -> tf.Tensor:
    """Return the cross-entropy of logits (n, ..., classes) and classes (n, ...), or probabilities (n, classes)."""
    if targets.dtype.is_floating:
        losses = tf.nn.softmax_cross_entropy_with_logits(labels=targets, logits=outputs)
    else:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=outputs)
    if label_smoothing:
        uniform = -tf.reduce_mean(tf.nn.log_softmax(outputs), axis=-1)
        losses = (1 - label_smoothing) * losses + label_smoothing * uniform
    return losses


def _weighted_cross_entropy(
    outputs: tf.Tensor, targets: tf.Tensor, label_smoothing: float, class_weights: Sequence[float]
) -> tf.Tensor:
    """Return the cross-entropy with a factor for the term of each class, as in torch's cross_entropy."""
    num_classes = len(class_weights)
    shares = targets if targets.dtype.is_floating else tf.one_hot(targets, num_classes)
    shares = (1 - label_smoothing) * shares + label_smoothing / num_classes
    terms = tf.constant(class_weights, tf.float32) * shares * tf.nn.log_softmax(outputs)
    return -tf.reduce_sum(terms, axis=-1)


def _users(function: Measure, outputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    """Return the loss of a user's function, which returns the mean over all samples or the loss of each sample."""
    losses = user_file.call_often(function, tf.cast(outputs, tf.float32), targets, flag="--loss")
    if not isinstance(losses, tf.Tensor) or tuple(losses.shape[:1]) not in ((), tuple(targets.shape[:1])):
        raise wrong_loss(function, getattr(losses, "shape", losses))
    return tf.reduce_mean(losses) * tf.cast(tf.shape(targets)[0], tf.float32)


def _check(function: Callable) -> None:
    """Raise UserError if a loss has variables, which are neither shared by ranks nor saved, or has no reduction."""
    if isinstance(function, keras.losses.Loss) and function.reduction in (None, "none"):
        raise UserError(
            f"expected a loss of Keras that is a mean over samples, received {name_of(function)} with "
            f"reduction={function.reduction!r}, whose losses Keras adds up in training; leave it out"
        )
    for attribute, value in getattr(function, "__dict__", {}).items():
        if isinstance(value, (keras.Variable, tf.Variable)):
            raise UserError(
                f"{name_of(function)} of --loss has a variable, {attribute}, which checkpoints lack; make it a number"
            )


def _targets_last(function: Callable) -> Callable:
    """Return a user's function of outputs and targets; Keras' own losses take them in the other order."""
    called = function
    while isinstance(called, partial):
        called = called.func
    is_of_keras = isinstance(called, keras.losses.Loss) or getattr(called, "__module__", "").startswith("keras.")
    if not is_of_keras:
        return function

    def swapped(outputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        return function(targets, outputs)

    swapped.__name__ = name_of(function)
    return swapped


def _sum_over_samples(measure: Measure, outputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    measured = measure(tf.cast(outputs, tf.float32), targets)
    num_elements = cast("int", measured.shape[1:].num_elements())  # only the number of samples is unknown
    return tf.reduce_sum(measured) / num_elements


def _mae(outputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    return tf.abs(outputs - targets)


def _huber(outputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    """Return Huber's loss (1964): quadratic up to a difference of 1, linear beyond."""
    apart = _mae(outputs, targets)
    return tf.where(apart < 1, tf.square(apart) / 2, apart - 0.5)


_LOSSES: dict[str, Measure] = {
    "mse": tf.math.squared_difference,
    "mae": _mae,
    "huber": _huber,
    "bce": lambda outputs, targets: tf.nn.sigmoid_cross_entropy_with_logits(labels=targets, logits=outputs),
}
