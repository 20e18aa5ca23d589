"""Batch norm as PyTorch has it, and what becomes of its running statistics; `pytorch/networks/batch_norm.py` computes
the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import keras
import tensorflow as tf
from keras import layers

# In which proportion samples count in running statistics.
_COUNTS: ContextVar[float | tf.Tensor] = ContextVar("counts", default=1.0)


@contextlib.contextmanager
def counted(counts: float | tf.Tensor) -> Iterator[None]:
    """Within it, samples change running statistics if `counts` is 1; if it is 0, they only fill an empty slice up."""
    token = _COUNTS.set(counts)
    try:
        yield
    finally:
        _COUNTS.reset(token)


_TRACKED: ContextVar[bool] = ContextVar("tracked", default=True)


@contextlib.contextmanager
def tracked(is_tracked: bool) -> Iterator[None]:
    """Within it, samples change running statistics or not: not, where they are computed once more."""
    token = _TRACKED.set(is_tracked)
    try:
        yield
    finally:
        _TRACKED.reset(token)


# Running statistics by the paths of their variables, where they are not to be assigned.
_SET_ASIDE: ContextVar[dict[str, tf.Tensor] | None] = ContextVar("set_aside", default=None)


@contextlib.contextmanager
def statistics_set_aside() -> Iterator[dict[str, tf.Tensor]]:
    """Within it, batch norms leave their running statistics as they are; what they would be now is in what it gives."""
    values: dict[str, tf.Tensor] = {}
    token = _SET_ASIDE.set(values)
    try:
        yield values
    finally:
        _SET_ASIDE.reset(token)


class BatchNorm(layers.Layer):
    """Batch norm as PyTorch has it, in one fused kernel.

    Keras' own keeps the variance of the samples as the running one, without Bessel's correction, and takes several
    passes over the values. Each device keeps the statistics of its own samples until the worker averages them.
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
        if _TRACKED.get():
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
        """Normalise samples in training by their own mean and variance; --sync-batch-norm puts another in its place.

        Args:
            counts: see `counted`.

        Returns: the normalised values, mean and unbiased variance, and in which proportion these count.
        """
        return *self._fused(inputs), counts

    def _fused(self, inputs: tf.Tensor, **statistics: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Values normalised by `statistics`, or by their own where there are none; their mean and unbiased variance."""
        return tf.compat.v1.nn.fused_batch_norm(
            inputs, self.gamma.value, self.beta.value, epsilon=self.EPSILON, is_training=not statistics, **statistics
        )
