"""Batch norm over the global batch, on any device, with the formulas of `pytorch/strategies/batch_norm.py`."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from allstep.common.base.errors import UserError
from allstep.tensorflow.compat import layers_of, number_in_graph
from allstep.tensorflow.networks.batch_norm import BatchNorm, Reduce, counts_of_samples, moments_of_all


def synchronise_batch_norm(model: keras.Model, reduce: Reduce, *, wanted: bool) -> None:
    """Make batch norms normalise by the mean and variance of the samples of all ranks and devices.

    These are all of them if `wanted`, else only Keras' BatchNormalization(synchronized=True) in a user's network.
    Raises UserError if a subclass of Keras' layer has its own `call`.
    """
    for layer in layers_of(model):
        if isinstance(layer, BatchNorm) and wanted:
            layer.normalise = _OverAll(layer, reduce).normalise
        elif isinstance(layer, keras.layers.BatchNormalization) and (wanted or layer.synchronized):
            _check(layer)
            layer._moments = _OverAll(layer, reduce).moments  # pyright: ignore[reportAttributeAccessIssue]


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


class _OverAll:
    """Statistics of a batch norm over the samples of all ranks and devices, however many each has."""

    def __init__(self, layer: BatchNorm | keras.layers.BatchNormalization, reduce: Reduce) -> None:
        self._layer: Any = layer
        self._reduce = reduce

    def moments(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        """Return mean and variance (channels,) of inputs (samples, ..., channels), whose axis may be another one.

        It replaces Keras' `BatchNormalization._moments`.
        """
        layer = self._layer
        counts = tf.constant(True) if mask is None else tf.expand_dims(tf.cast(mask, tf.bool), -1)
        name = f"{layer.path}.{number_in_graph(str(layer.path))}"
        counts, axes = counts & (counts_of_samples() > 0), layer._reduction_axes or []
        return self._moments(inputs, counts, axes, name, (layer.moving_mean, layer.moving_variance))[:2]

    def normalise(
        self, inputs: tf.Tensor, counts: float | tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
        """See `BatchNorm.normalise`."""
        layer, values = self._layer, tf.cast(inputs, tf.float32)  # a count in bfloat16 would lose digits
        axes, running = list(range(len(values.shape) - 1)), (layer.running_mean, layer.running_variance)
        mean, variance, number = self._moments(values, counts > 0, axes, layer.name, running)
        unbiased = variance * number / tf.maximum(number - 1, 1.0)
        normalised = (values - mean) * tf.math.rsqrt(variance + layer.EPSILON) * layer.gamma.value + layer.beta.value
        return tf.cast(normalised, inputs.dtype), mean, unbiased, tf.minimum(number, 1.0)

    def _moments(
        self, x: tf.Tensor, counts: Any, axes: list[int], name: str, running: Sequence[keras.Variable]
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return mean, variance and number of the values that count; mean and variance are `running` if none do."""
        counts = tf.broadcast_to(counts, tf.shape(x))
        found = moments_of_all(x, counts, axes, self._reduce, f"batch_norm.{name}")
        mean, variance, number = (tf.squeeze(one, axes) for one in found)
        mean_before, variance_before = (tf.cast(one, mean.dtype) for one in running)
        return tf.where(number > 0, mean, mean_before), tf.where(number > 0, variance, variance_before), number
