"""LAMB: Adam whose update of each layer is as long as the learning rate times the layer's weight."""

from __future__ import annotations

import keras
import tensorflow as tf

from allstep.tensorflow.optimizers.base import Optimizer, is_layer, norm, ratio_of


@keras.saving.register_keras_serializable("allstep")
class LAMB(Optimizer):
    """You et al. 2020, algorithm 2, with phi(x) = x:

        m = 0.9 * m + 0.1 * g;  v = 0.999 * v + 0.001 * g^2
        u = m / (1 - 0.9^t) / (sqrt(v / (1 - 0.999^t)) + 1e-6) + decay * w
        w = w - lr * |w| / |u| * u

    |w| / |u| is 1 where one of them is 0, and for biases and the scales of norms. `keras.optimizers.Lamb` has the decay
    outside of u, which is not the paper's, and ratios for biases and norms.
    """

    BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-6
    slot_names = ("exp_avg", "exp_avg_sq")

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        dtype, rate = variable.dtype, tf.cast(learning_rate, variable.dtype)
        mean, mean_of_squares = (self.slot(name, variable) for name in self.slot_names)
        # Adam in one kernel, of which the learning rate 0 leaves the weight and moves its slots.
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=mean.handle,
            v=mean_of_squares.handle,
            beta1_power=tf.zeros((), dtype),
            beta2_power=tf.zeros((), dtype),
            lr=tf.zeros((), dtype),
            beta1=tf.constant(self.BETA_1, dtype),
            beta2=tf.constant(self.BETA_2, dtype),
            epsilon=tf.constant(self.EPSILON, dtype),
            grad=gradient,
        )
        correction_1, correction_2 = self.correction(self.BETA_1), self.correction(self.BETA_2)
        # The paper's quotient, with the corrections multiplied into scalars: fewer passes over the weights.
        root_factor = tf.cast(correction_1 / tf.sqrt(correction_2), dtype)
        update = mean / (root_factor * tf.sqrt(mean_of_squares) + tf.cast(correction_1 * self.EPSILON, dtype))
        if decay := self.decay_of(variable):
            update += decay * variable
        if is_layer(variable):
            weight_norm, update_norm = norm(variable), norm(update)
            rate *= ratio_of(weight_norm, update_norm, holds=(weight_norm > 0) & (update_norm > 0))
        tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=update)
