"""Batch norm over the samples of all ranks: `BatchNormalization(synchronized=True)` under Horovod.

Keras knows the replicas of tf.distribute alone. Importing this module makes the option mean Horovod's ranks.
"""

from collections.abc import Callable
from typing import Any, cast

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from allstep.tensorflow.compat import (
    is_in_xla,
    number_in_graph,
    wrap_masked_moments,
    wrap_synchronised_moments,
    wrapper,
)
from allstep.tensorflow.networks.batch_norm import moments_of_all

Moments = tuple[tf.Tensor, tf.Tensor]
"""Mean and variance."""


def SyncBatchNormalization(*args: Any, **options: Any) -> keras.layers.BatchNormalization:  # noqa: N802 (Horovod's name)
    """Return a `keras.layers.BatchNormalization` over the samples of all ranks; it is saved as Keras' own layer."""
    return keras.layers.BatchNormalization(*args, **{**options, "synchronized": True})


def synchronises(layer: keras.layers.Layer) -> bool:
    """Return whether the layer communicates in each step."""
    return isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized


@wrapper
def _over_ranks(moments: Callable[..., Any], x: tf.Tensor, axes: list[int], keepdims: bool) -> Moments:
    """Wrap Keras' moments over replicas: `moments(x, axes, keepdims)` returns mean and variance."""
    if not hvd.is_initialized() or hvd.size() == 1:
        return moments(x, axes, keepdims)
    mean, variance = _moments_of_all(x, tf.ones_like(x, tf.bool), axes)
    return (mean, variance) if keepdims else (tf.squeeze(mean, axes), tf.squeeze(variance, axes))


@wrapper
def _masked_over_ranks(moments: Callable[..., Any], self: Any, inputs: tf.Tensor, mask: tf.Tensor | None) -> Moments:
    """Wrap `BatchNormalization._moments`, which leaves out the other replicas where samples have a mask."""
    if mask is None or not self.synchronized or not hvd.is_initialized() or hvd.size() == 1:
        return moments(self, inputs, mask)
    counts = tf.broadcast_to(tf.expand_dims(tf.cast(mask, tf.bool), -1), tf.shape(inputs))
    mean, variance = _moments_of_all(inputs, counts, self._reduction_axes)
    return tf.squeeze(mean), tf.squeeze(variance)


def _moments_of_all(x: tf.Tensor, counts: tf.Tensor, axes: list[int]) -> Moments:
    """Return mean and variance, with their axes kept, of those values of all ranks that count."""
    if is_in_xla():
        raise NotImplementedError(
            "BatchNormalization(synchronized=True) asks the other ranks in each step, which XLA cannot compile: "
            "compile the model with jit_compile=False."
        )
    # By the order in the step, which is the same on all ranks; Keras' names of layers may differ.
    name = f"synchronised_moments.{number_in_graph('synchronised_moments')}"
    mean, variance, _ = moments_of_all(x, counts, axes, _all_reduce, name)
    return mean, variance


def _all_reduce(values: tf.Tensor, name: str) -> tf.Tensor:
    return cast("tf.Tensor", hvd.allreduce(values, op=hvd.Sum, name=name, ignore_name_scope=True))


wrap_synchronised_moments(_over_ranks)
wrap_masked_moments(_masked_over_ranks)
