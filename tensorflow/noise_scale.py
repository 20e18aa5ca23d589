"""What the gradient noise scale needs of a step: the norms of the parts' gradients, and of their average."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from allstep.common.recipe.noise_scale import MEASURED_EVERY
from allstep.tensorflow.optimizers.base import Optimizer


class GradientSquares:
    """Squares of the norms of gradients, within a traced step; `noise_scale` of `pytorch/` has the same.

    They are 0 in steps that are not to be measured, in which nothing is computed for them.
    """

    def __init__(self, optimizer: Optimizer, num_local_devices: int) -> None:
        self._optimizer, self._num_local_devices = optimizer, num_local_devices
        self._changes, optimizer.changes = optimizer.changes, self._see_average

    def see_part(self, gradients: Sequence[tf.Tensor], factor: tf.Tensor) -> tf.Tensor:
        """Of the gradient of a part's mean loss, given times `factor`; 0 where that is 0: a part without samples."""
        return self._square(gradients, tf.math.square(factor))

    @property
    def average(self) -> tf.Tensor:
        """Of the averaged gradient, before it is changed; over the devices of this process, which add it up.

        There once the optimizer was traced.
        """
        return tf.identity(self._average)  # one tensor of several devices would count once

    def _see_average(self, gradients: Sequence[tf.Tensor], step: tf.Tensor) -> Sequence[tf.Tensor]:
        self._average = self._square(gradients, tf.constant(float(self._num_local_devices)))
        return self._changes(gradients, step) if self._changes else gradients

    def _square(self, gradients: Sequence[tf.Tensor], divisor: tf.Tensor) -> tf.Tensor:
        def compute() -> tf.Tensor:
            return tf.math.divide_no_nan(2 * tf.add_n([tf.nn.l2_loss(one) for one in gradients]), divisor)

        is_due = tf.math.floormod(self._optimizer.num_steps, MEASURED_EVERY) == 0
        return tf.cond(is_due, compute, lambda: tf.constant(0.0))
