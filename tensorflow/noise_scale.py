"""What the gradient noise scale needs of a step: the norms of gradients of passes, and of their average."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import keras
import tensorflow as tf

from allstep.common.recipe.noise_scale import MEASURED_EVERY
from allstep.tensorflow.observer import Observer
from allstep.tensorflow.passes import Gradients


class GradientSquares(Observer):
    """Squares of the norms of gradients, within a traced step; `pytorch/noise_scale.py` has the same.

    They are 0 in steps that are not to be measured, in which nothing is computed for them.
    """

    measures = ("squares_of_parts",)

    def __init__(self, optimizer: keras.Optimizer, num_local_devices: int) -> None:
        self._optimizer, self._num_local_devices = optimizer, num_local_devices

    def see_pass(self, gradients: Gradients, factor: tf.Tensor) -> Mapping[str, tf.Tensor]:
        # 0 where the factor is 0: a pass without samples.
        return {"squares_of_parts": self._square(gradients, tf.math.square(factor))}

    def see_averages(self, gradients: Gradients) -> None:
        # The devices of this process all have it, and it is added up over them.
        self._average = self._square(gradients, tf.constant(float(self._num_local_devices)))

    def numbers(self) -> Mapping[str, tf.Tensor]:
        return {"square_of_average": tf.identity(self._average)}  # one tensor of several devices would count once

    def _square(self, gradients: Gradients, divisor: tf.Tensor) -> tf.Tensor:
        def compute() -> tf.Tensor:
            squares = [tf.nn.l2_loss(one) for one in gradients if one is not None]
            return tf.math.divide_no_nan(2 * tf.add_n(squares), divisor)

        num_steps = cast("keras.Variable", self._optimizer.iterations).value
        return tf.cond(tf.math.floormod(num_steps, MEASURED_EVERY) == 0, compute, lambda: tf.constant(0.0))
