"""A moving average of the weights, for validation and for checkpoints. `pytorch/averaging.py` has the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from allstep.tensorflow.models import CanonicalWeight
from allstep.tensorflow.observer import Observer
from allstep.tensorflow.strategies.strategy import Strategy


class WeightAverage(Observer):
    """a = w after the first step, a = decay * a + (1 - decay) * w after each other one (Polyak and Juditsky 1992).

    Running statistics of batch norms are not averaged: they are averages.
    """

    def __init__(self, weights: Sequence[CanonicalWeight], decay: float, strategy: Strategy) -> None:
        """`weights` have gradients, in the model's order."""
        self._decay, self._strategy, self._variables = decay, strategy, [weight.variable for weight in weights]
        with strategy.scope():
            averages = [_zeros_beside(variable) for variable in self._variables]
        self.state = [
            (f"ema/{weight.name}", weight, average) for weight, average in zip(weights, averages, strict=True)
        ]

    def see_updates(self, num_steps: tf.Tensor) -> None:
        kept = tf.where(num_steps == 0, 0.0, self._decay)

        def update(average: tf.Variable, weight: tf.Tensor, kept: tf.Tensor) -> None:
            kept = tf.cast(kept, weight.dtype)
            average.assign(kept * average + (1 - kept) * weight)

        def everywhere(distribution: tf.distribute.Strategy, kept: tf.Tensor) -> None:
            for variable, (_, _, average) in zip(self._variables, self.state, strict=True):
                distribution.extended.update(average.value, update, args=(variable.value, kept), group=False)

        distribution = tf.distribute.get_strategy()
        tf.__internal__.distribute.interim.maybe_merge_call(everywhere, distribution, kept)

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for variable, (_, _, average) in zip(self._variables, self.state, strict=True):
            kept, *_ = self._strategy.replicas(variable)
            kept = kept.copy()  # which may be the variable's own memory
            variable.assign(self._strategy.replicas(average)[0])
            average.assign(kept)


def _zeros_beside(variable: keras.Variable) -> keras.Variable:
    with tf.distribute.get_strategy().extended.colocate_vars_with(variable.value):
        name = f"{variable.path.replace('/', '_')}_average"
        return keras.Variable("zeros", shape=variable.shape, dtype=variable.dtype, trainable=False, name=name)
