"""Batch norm over the global batch, on any device; `tensorflow/networks/batch_norm.py` has the one over each device's
samples, and `pytorch/strategies/batch_norm.py` the same formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import keras
import tensorflow as tf

from allstep.tensorflow.networks.batch_norm import BatchNorm

Reduce = Callable[[tf.Tensor, str], tf.Tensor]
"""The sum of a tensor over all ranks and devices; the name is the same on all of them and no other sum's."""


def synchronise_batch_norm(model: keras.Model, reduce: Reduce, *, wanted: bool) -> None:
    """Have each batch norm normalise by the mean and variance of the samples of all ranks and devices, if wanted."""
    for layer in model.layers if wanted else ():
        if isinstance(layer, BatchNorm):
            layer.normalise = _OverAll(layer, reduce)


class _OverAll:
    """Normalises by mean and variance of the samples of all ranks and devices, however many each has."""

    def __init__(self, layer: BatchNorm, reduce: Reduce) -> None:
        self._layer, self._reduce = layer, reduce

    def __call__(
        self, inputs: tf.Tensor, counts: float | tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
        """See `BatchNorm.normalise`."""
        layer, dtype = self._layer, inputs.dtype
        values = tf.cast(inputs, tf.float32)  # a count in bfloat16 would lose digits
        axes = list(range(len(values.shape) - 1))
        local_count = tf.cast(tf.reduce_prod(tf.shape(values)[:-1]), tf.float32)
        # The mean first, the variance around it then: the sum of squares alone would lose digits.
        sums = self._sum(counts * tf.concat([tf.reduce_sum(values, axes), [local_count]], 0), "mean")
        count = tf.maximum(sums[-1], 1.0)
        # Where the samples of no rank count, the statistics of before keep the values in range.
        is_empty = sums[-1] == 0
        mean = tf.where(is_empty, layer.running_mean.value, sums[:-1] / count)
        centred = values - mean
        variance = self._sum(counts * tf.reduce_sum(tf.square(centred), axes), "variance") / count
        unbiased = variance * count / tf.maximum(count - 1, 1.0)
        variance = tf.where(is_empty, layer.running_variance.value, variance)
        normalised = centred * tf.math.rsqrt(variance + layer.EPSILON) * layer.gamma.value + layer.beta.value
        return tf.cast(normalised, dtype), mean, unbiased, tf.minimum(sums[-1], 1.0)

    def _sum(self, values: tf.Tensor, what: str) -> tf.Tensor:
        name = f"batch_norm.{self._layer.name}.{what}"

        @tf.custom_gradient
        def summed(values: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            # Each sum is on all ranks, so the gradient of what was added is the sum of the gradients of the sums.
            return self._reduce(values, name), lambda gradient: self._reduce(gradient, f"{name}.gradient")

        return cast("tf.Tensor", summed(values))  # what the decorated function returns is that and its gradient
