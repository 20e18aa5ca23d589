"""RMSprop."""

from __future__ import annotations

import keras
import tensorflow as tf

from allstep.tensorflow.optimizers.base import Optimizer


@keras.saving.register_keras_serializable("allstep")
class RMSprop(Optimizer):
    """Tieleman and Hinton 2012 in torch's form: s = 0.99 * s + 0.01 * g^2; w = w - lr * g / (sqrt(s) + 1e-8).

    The decay is in g. Keras' own has 0.9, and epsilon = 1e-7 under the root.
    """

    RHO, EPSILON = 0.99, 1e-8
    slot_names = ("square_avg",)

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        gradient, mean_of_squares = self.with_decay(gradient, variable), self.slot("square_avg", variable)
        mean_of_squares.assign_add((1 - self.RHO) * (tf.square(gradient) - mean_of_squares))
        tf.raw_ops.ResourceApplyGradientDescent(
            var=variable.handle,
            alpha=tf.cast(learning_rate, variable.dtype),
            delta=gradient / (tf.sqrt(mean_of_squares) + self.EPSILON),
        )
