"""LAMB: Adam whose update of each layer is as long as the learning rate times the layer's weight."""

from __future__ import annotations

import keras
import tensorflow as tf

from allstep.tensorflow.compat import is_in_xla, momentary_variable
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
        rate, decay = tf.cast(learning_rate, variable.dtype), self.decay_of(variable)
        if is_in_xla():
            self._adam(gradient, variable, moved=variable.handle, rate=0.0)  # leaves the weight and moves its slots
            update = self._quotient(variable)
            if decay:
                update += decay * variable
        else:
            with tf.device(variable.device), momentary_variable(decay * variable) as moved:
                self._adam(gradient, variable, moved=moved, rate=-1.0)  # makes a sum with what is there
                update = tf.raw_ops.ReadVariableOp(resource=moved, dtype=variable.dtype)
        if is_layer(variable):
            weight_norm, update_norm = norm(variable), norm(update)
            rate *= ratio_of(weight_norm, update_norm, holds=(weight_norm > 0) & (update_norm > 0))
        tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=update)

    def _adam(self, gradient: tf.Tensor, variable: tf.Variable, *, moved: tf.Tensor, rate: float) -> None:
        """Adam's step of a resource in one kernel, with the slots of the variable."""
        dtype = variable.dtype
        mean, mean_of_squares = (self.slot(name, variable) for name in self.slot_names)
        correction_1, correction_2 = self.correction(self.BETA_1), self.correction(self.BETA_2)
        tf.raw_ops.ResourceApplyAdam(
            var=moved,
            m=mean.handle,
            v=mean_of_squares.handle,
            beta1_power=tf.cast(1 - correction_1, dtype),
            beta2_power=tf.cast(1 - correction_2, dtype),
            lr=tf.constant(rate, dtype),
            beta1=tf.constant(self.BETA_1, dtype),
            beta2=tf.constant(self.BETA_2, dtype),
            # The kernel divides by sqrt(v) + epsilon where the paper has sqrt(v / correction_2) + epsilon.
            epsilon=tf.cast(self.EPSILON * tf.sqrt(correction_2), dtype),
            grad=gradient,
        )

    def _quotient(self, variable: tf.Variable) -> tf.Tensor:
        """The update without the decay, from slots that have moved; XLA knows no variables that end with the step."""
        mean, mean_of_squares = (self.slot(name, variable) for name in self.slot_names)
        correction_1, correction_2 = self.correction(self.BETA_1), self.correction(self.BETA_2)
        # The corrections are multiplied into scalars: fewer passes over the weights.
        root_factor = tf.cast(correction_1 / tf.sqrt(correction_2), variable.dtype)
        return mean / (root_factor * tf.sqrt(mean_of_squares) + tf.cast(correction_1 * self.EPSILON, variable.dtype))
