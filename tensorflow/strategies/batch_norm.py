"""Batch norm over the global batch, on any device; `tensorflow/networks/batch_norm.py` has the one over each device's
samples, and `pytorch/strategies/batch_norm.py` the same formulas."""

from __future__ import annotations

import keras
import tensorflow as tf

from allstep.common.base.errors import UserError
from allstep.tensorflow.compat import layers_of, number_in_graph
from allstep.tensorflow.networks.batch_norm import BatchNorm, Reduce, counts_of_samples, moments_of_all, sum_of_all


def synchronise_batch_norm(model: keras.Model, reduce: Reduce, *, wanted: bool) -> None:
    """Have batch norms normalise by the mean and variance of the samples of all ranks and devices.

    They are all if `wanted`, else those alone that a network brings as Keras' BatchNormalization(synchronized=True).
    Raises UserError if a subclass of Keras' layer computes something of its own.
    """
    for layer in layers_of(model):
        if isinstance(layer, BatchNorm) and wanted:
            layer.normalise = _OverAll(layer, reduce)
        elif isinstance(layer, keras.layers.BatchNormalization) and (wanted or layer.synchronized):
            _check(layer)
            layer._moments = _MomentsOverAll(layer, reduce)  # pyright: ignore[reportAttributeAccessIssue]


def brought_synchronised(model: keras.Model) -> str | None:
    """Return the name of the first batch norm that a network brings as BatchNormalization(synchronized=True)."""
    norms = (layer for layer in layers_of(model) if isinstance(layer, keras.layers.BatchNormalization))
    return next((layer.name for layer in norms if layer.synchronized), None)


def _check(layer: keras.layers.BatchNormalization) -> None:
    if any(
        getattr(type(layer), name) is not getattr(keras.layers.BatchNormalization, name)
        for name in ("call", "_moments")
    ):
        raise UserError(
            f"expected batch norms of Keras with --sync-batch-norm, received {layer.name} of class "
            f"{type(layer).__name__}, which has a call of its own; leave --sync-batch-norm out, or use "
            "BatchNormalization and a layer after it"
        )


class _MomentsOverAll:
    """Computes what Keras' `BatchNormalization._moments` does over the samples of all ranks and devices."""

    def __init__(self, layer: keras.layers.BatchNormalization, reduce: Reduce) -> None:
        self._layer, self._reduce = layer, reduce

    def __call__(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        """Return mean and variance (channels,) of inputs (samples, ..., channels), whose axis may be another one."""
        layer, axes = self._layer, self._layer._reduction_axes or []
        counts = tf.ones_like(inputs, tf.bool) if mask is None else tf.expand_dims(tf.cast(mask, tf.bool), -1)
        counts = tf.broadcast_to(counts, tf.shape(inputs)) & (counts_of_samples() > 0)
        name = f"batch_norm.{layer.path}.{number_in_graph(str(layer.path))}"
        found = moments_of_all(inputs, counts, axes, self._reduce, name)
        mean, variance, number = (tf.squeeze(one, axes) for one in found)
        # Where the samples of no rank count, the statistics of before keep the values in range.
        return (
            tf.where(number > 0, mean, tf.cast(layer.moving_mean, mean.dtype)),
            tf.where(number > 0, variance, tf.cast(layer.moving_variance, mean.dtype)),
        )


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
        return sum_of_all(values, self._reduce, f"batch_norm.{self._layer.name}.{what}")
