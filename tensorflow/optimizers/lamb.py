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
        mean, mean_of_squares = (self.slot(name, variable) for name in self.slot_names)
        mean.assign_add((1 - self.BETA_1) * (gradient - mean))
        mean_of_squares.assign_add((1 - self.BETA_2) * (tf.square(gradient) - mean_of_squares))
        correction_1, correction_2 = (
            tf.cast(self.correction(beta), variable.dtype) for beta in (self.BETA_1, self.BETA_2)
        )
        update = mean / (correction_1 * (tf.sqrt(mean_of_squares / correction_2) + self.EPSILON))
        if decay := self.decay_of(variable):
            update += decay * variable
        rate = tf.cast(learning_rate, variable.dtype)
        if is_layer(variable):
            weight_norm, update_norm = norm(variable), norm(update)
            rate *= ratio_of(weight_norm, update_norm, holds=(weight_norm > 0) & (update_norm > 0))
        tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=update)
