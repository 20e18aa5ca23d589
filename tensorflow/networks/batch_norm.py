"""Batch norm as in `pytorch/networks/batch_norm.py`, whose running statistics can be set aside.

Also mean and variance over all ranks, for Keras' own layers.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import cast

import keras
import tensorflow as tf
from keras import layers

from allstep.common.process.environment import within

_COUNTS: ContextVar[float | tf.Tensor] = ContextVar("counts", default=1.0)
_SET_ASIDE: ContextVar[dict[str, tf.Tensor] | None] = ContextVar("set_aside", default=None)


def counted(counts: float | tf.Tensor) -> AbstractContextManager:
    """Update running statistics in the block if `counts` is 1; at 0, the samples are padding of an empty slice."""
    return within(_COUNTS, counts)


def statistics_set_aside() -> AbstractContextManager[dict[str, tf.Tensor]]:
    """Collect new running statistics of the block by their variables' paths, without assigning them."""
    return within(_SET_ASIDE, {})


counts_of_samples = _COUNTS.get
"""Returns the `counts` of the enclosing block."""


class BatchNorm(layers.Layer):
    """Batch norm as in PyTorch, in one fused kernel.

    Keras' batch norm keeps the running variance without Bessel's correction and takes several passes over the values.
    Each device keeps the statistics of its samples until the worker averages them.
    """

    MOMENTUM, EPSILON = 0.1, 1e-5

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        def weight(name: str, initial: str, **kind) -> keras.Variable:
            return self.add_weight(shape=input_shape[-1:], name=name, initializer=initial, autocast=False, **kind)

        self.gamma, self.beta = weight("gamma", "ones"), weight("beta", "zeros")
        self.running_mean = weight("running_mean", "zeros", trainable=False)
        self.running_variance = weight("running_variance", "ones", trainable=False)

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        return input_shape

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Normalise `inputs`, (samples, height, width, channels)."""
        if not training:
            return self._fused(inputs, mean=self.running_mean.value, variance=self.running_variance.value)[0]
        values, mean, variance, counts = self.normalise(inputs, _COUNTS.get())
        momentum = self.MOMENTUM * counts
        for running, current in ((self.running_mean, mean), (self.running_variance, variance)):
            value = running.value * (1 - momentum) + current * momentum
            if (set_aside := _SET_ASIDE.get()) is None:
                running.assign(value)
            else:
                set_aside[running.path] = value
        return values

    def normalise(
        self, inputs: tf.Tensor, counts: float | tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, float | tf.Tensor]:
        """Normalise samples in training by their mean and variance; --sync-batch-norm replaces this method.

        The result is the normalised values, their mean and unbiased variance, and the weight of these two. For `counts`
        see `counted`.
        """
        return *self._fused(inputs), counts

    def _fused(self, inputs: tf.Tensor, **statistics: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return values normalised by `statistics`, by default their own, and their mean and unbiased variance."""
        return tf.compat.v1.nn.fused_batch_norm(
            inputs, self.gamma.value, self.beta.value, epsilon=self.EPSILON, is_training=not statistics, **statistics
        )


Reduce = Callable[[tf.Tensor, str], tf.Tensor]
"""The sum of a tensor over all ranks and devices; the name is the same on all of them and no other sum's."""


def moments_of_all(
    x: tf.Tensor, counts: tf.Tensor, axes: Sequence[int], reduce: Reduce, name: str
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return mean, variance and number, with their axes kept, of those values of all ranks where `counts` is true."""
    zero, number = tf.zeros_like(x), tf.reduce_sum(tf.cast(counts, x.dtype), axes, keepdims=True)
    parts = tf.stack([tf.reduce_sum(tf.where(counts, x, zero), axes, keepdims=True), number])
    total, number = tf.unstack(sum_of_all(parts, reduce, f"{name}.mean"))
    mean = tf.math.divide_no_nan(total, number)
    # Squares around the mean: the sum of squares alone would lose digits.
    centred = tf.where(counts, x - mean, zero)
    squares = sum_of_all(tf.reduce_sum(tf.square(centred), axes, keepdims=True), reduce, f"{name}.variance")
    return mean, tf.math.divide_no_nan(squares, number), number


def sum_of_all(values: tf.Tensor, reduce: Reduce, name: str) -> tf.Tensor:
    """Return the sum of `values` over all ranks and devices, through which gradients flow back."""

    @tf.custom_gradient
    def summed(values: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        # Each sum is on all ranks, so the gradient of what was added is the sum of the gradients of the sums.
        return reduce(values, name), lambda gradient: reduce(gradient, f"{name}.gradient")

    return cast("tf.Tensor", summed(values))  # what the decorated function returns is that and its gradient
