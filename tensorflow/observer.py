"""Observers of training steps: a trace, the noise scale, a moving average. `pytorch/observer.py` has the same."""

from collections.abc import Mapping, Sequence
from typing import cast

import keras
import tensorflow as tf

from allstep.common.data.loader import Batch
from allstep.common.recipe.noise_scale import MEASURED_EVERY
from allstep.common.training.worker import StepResult
from allstep.tensorflow.models import CanonicalWeight
from allstep.tensorflow.passes import Gradients
from allstep.tensorflow.strategies.strategy import Strategy


class Observer:
    """Observer of training steps, partly within the traced step. This base class does nothing."""

    state: Sequence[tuple[str, CanonicalWeight]] = ()
    """Names and variables of the observer's state in a checkpoint."""

    sees_slices = False
    """Whether it observes slices, whose vectors must then leave the traced step."""
    measures: Sequence[str] = ()
    """Names of the numbers that `see_pass` returns."""

    def begin(self, batch: Batch, learning_rate: float) -> None:
        """Begin a step on this rank's share of a global batch."""

    def see_pass(self, gradients: Gradients, factor: tf.Tensor) -> Mapping[str, tf.Tensor]:
        """Return numbers for the `StepResult`, given the gradients of a pass's mean loss times `factor`; traced.

        They are added up over passes and devices.
        """
        return {}

    def see_local(self, gradients: Gradients) -> None:
        """See the gradients of a device, added up over its passes; traced."""

    def see_slice(self, number: int, vector: tf.Tensor, *, has_samples: bool) -> None:
        """See the vector of a slice: the sum of its losses, its gradients and more (--slices)."""

    def see_sum(self, vector: tf.Tensor) -> None:
        """See the sum of the vectors of all slices (--slices)."""

    def see_averages(self, gradients: Gradients) -> None:
        """See the averaged gradients, before anything changes them; traced."""

    def see_updates(self, num_steps: tf.Tensor) -> None:
        """See the weights after the optimizer's update, which follows `num_steps` earlier ones; traced."""

    def numbers(self) -> Mapping[str, tf.Tensor]:
        """Return further numbers for the `StepResult` after the update, to be added up over devices; traced."""
        return {}

    def end(self, result: StepResult) -> None:
        """End the step, which may have had no update."""

    def exchange_weights(self) -> None:
        """Exchange the network's weights and their moving averages, if the observer has any."""


class GradientSquares(Observer):
    """Squares of the norms of gradients; `pytorch/observer.py` has the same. They are 0 in unmeasured steps."""

    measures = ("squares_of_parts",)

    def __init__(self, optimizer: keras.Optimizer, num_local_devices: int) -> None:
        self._optimizer, self._num_local_devices = optimizer, num_local_devices

    def see_pass(self, gradients: Gradients, factor: tf.Tensor) -> Mapping[str, tf.Tensor]:
        # A pass without samples has the factor 0, and the square 0.
        return {"squares_of_parts": self._square(gradients, tf.math.square(factor))}

    def see_averages(self, gradients: Gradients) -> None:
        # All devices of this process have the average, and it is added up over them.
        self._average = self._square(gradients, tf.constant(float(self._num_local_devices)))

    def numbers(self) -> Mapping[str, tf.Tensor]:
        return {"square_of_average": tf.identity(self._average)}  # one tensor of several devices would count once

    def _square(self, gradients: Gradients, divisor: tf.Tensor) -> tf.Tensor:
        def compute() -> tf.Tensor:
            squares = [tf.nn.l2_loss(one) for one in gradients if one is not None]
            return tf.math.divide_no_nan(2 * tf.add_n(squares), divisor)

        num_steps = cast("keras.Variable", self._optimizer.iterations).value
        return tf.cond(tf.math.floormod(num_steps, MEASURED_EVERY) == 0, compute, lambda: tf.constant(0.0))


class WeightAverage(Observer):
    """Moving average of the weights, by the formula in `pytorch/observer.py`."""

    def __init__(self, weights: Sequence[CanonicalWeight], decay: float, strategy: Strategy) -> None:
        """`weights` have gradients, in the model's order."""
        self._decay, self._strategy, self._variables = decay, strategy, [weight.variable for weight in weights]
        with strategy.scope():
            averages = [_zeros_beside(variable) for variable in self._variables]
        self.state = [
            (f"ema/{weight.name}", weight.like(average)) for weight, average in zip(weights, averages, strict=True)
        ]

    def see_updates(self, num_steps: tf.Tensor) -> None:
        kept = tf.where(num_steps == 0, 0.0, self._decay)

        def update(average: tf.Variable, weight: tf.Tensor, kept: tf.Tensor) -> None:
            kept = tf.cast(kept, weight.dtype)
            average.assign(kept * average + (1 - kept) * weight)

        def everywhere(distribution: tf.distribute.Strategy, kept: tf.Tensor) -> None:
            for variable, (_, average) in zip(self._variables, self.state, strict=True):
                distribution.extended.update(average.variable.value, update, args=(variable.value, kept), group=False)

        distribution = tf.distribute.get_strategy()
        tf.__internal__.distribute.interim.maybe_merge_call(everywhere, distribution, kept)

    def exchange_weights(self) -> None:
        for variable, (_, average) in zip(self._variables, self.state, strict=True):
            kept, *_ = self._strategy.replicas(variable)
            kept = kept.copy()  # it may share the variable's memory
            variable.assign(self._strategy.replicas(average.variable)[0])
            average.variable.assign(kept)


def _zeros_beside(variable: keras.Variable) -> keras.Variable:
    with tf.distribute.get_strategy().extended.colocate_vars_with(variable.value):
        name = f"{variable.path.replace('/', '_')}_average"
        return keras.Variable("zeros", shape=variable.shape, dtype=variable.dtype, trainable=False, name=name)
