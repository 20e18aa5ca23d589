"""LAMB: Adam whose update of each layer is as long as the learning rate times the layer's weight."""

from __future__ import annotations

import keras
import tensorflow as tf

from allstep.tensorflow.compat import is_in_xla, momentary_variable
from allstep.tensorflow.optimizers.adam import AdamKernel
from allstep.tensorflow.optimizers.base import is_layer, norm, ratio_of


@keras.saving.register_keras_serializable("allstep")
class LAMB(AdamKernel):
    """You et al. 2020, algorithm 2, with phi(x) = x:

        m = 0.9 * m + 0.1 * g;  v = 0.999 * v + 0.001 * g^2
        u = m / (1 - 0.9^t) / (sqrt(v / (1 - 0.999^t)) + 1e-6) + decay * w
        w = w - lr * |w| / |u| * u

    |w| / |u| is 1 where one of them is 0, and for biases and the scales of norms. `keras.optimizers.Lamb` has the decay
    outside of u, which is not the paper's, and ratios for biases and norms.
    """

    EPSILON = 1e-6

    def update_step(
        self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tuple[tf.Tensor, tf.Tensor, tf.Tensor]
    ) -> None:
        rate, correction, epsilon = (tf.cast(number, variable.dtype) for number in learning_rate)
        update = self._update(gradient, variable, correction, epsilon)
        if is_layer(variable):
            weight_norm, update_norm = norm(variable), norm(update)
            rate *= ratio_of(weight_norm, update_norm, holds=(weight_norm > 0) & (update_norm > 0))
        tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=update)

    def _update(
        self, gradient: tf.Tensor, variable: tf.Variable, correction: tf.Tensor, epsilon: tf.Tensor
    ) -> tf.Tensor:
        """u, for which Adam's kernel moves a variable that starts as decay * w."""
        decayed = self.decay_of(variable) * variable
        if not is_in_xla():
            with tf.device(variable.device):
                moved = momentary_variable(decayed)
                self.apply_adam(gradient, variable, moved=moved, rate=-correction, epsilon=epsilon)
                return tf.raw_ops.ReadVariableOp(resource=moved, dtype=variable.dtype)
        # XLA has no such variables: the kernel, at rate 0, leaves the weight and moves its moments.
        self.apply_adam(gradient, variable, moved=variable.handle, rate=tf.zeros_like(correction), epsilon=epsilon)
        mean, mean_of_squares = (self.slot(name, variable) for name in self.slot_names)
        return correction * mean / (tf.sqrt(mean_of_squares) + epsilon) + decayed
