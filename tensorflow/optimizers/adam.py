"""Adam and AdamW."""

from __future__ import annotations

import keras
import tensorflow as tf

from allstep.tensorflow.optimizers.base import Optimizer


@keras.saving.register_keras_serializable("allstep")
class Adam(Optimizer):
    """Adam (Kingma and Ba 2015, algorithm 1), with the decay in the gradient; `decoupled`, AdamW (Loshchilov and
    Hutter 2019), where the weight itself decays by lr * decay.

    One fused kernel a variable. Keras' own adds epsilon before it corrects the bias.
    """

    BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8
    slot_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, learning_rate: float = 0.0, decoupled: bool = False, **kwargs) -> None:
        super().__init__(learning_rate, **kwargs)
        self.decoupled = decoupled

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        dtype, rate = variable.dtype, tf.cast(learning_rate, variable.dtype)
        correction_1, correction_2 = self.correction(self.BETA_1), self.correction(self.BETA_2)
        if not self.decoupled:
            gradient = self.with_decay(gradient, variable)
        elif decay := self.decay_of(variable):
            variable.assign_sub(rate * decay * variable)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=self.slot("exp_avg", variable).handle,
            v=self.slot("exp_avg_sq", variable).handle,
            beta1_power=tf.cast(1 - correction_1, dtype),
            beta2_power=tf.cast(1 - correction_2, dtype),
            lr=rate,
            beta1=tf.constant(self.BETA_1, dtype),
            beta2=tf.constant(self.BETA_2, dtype),
            # The kernel divides by sqrt(v) + epsilon where the paper has sqrt(v / correction_2) + epsilon.
            epsilon=tf.cast(self.EPSILON * tf.sqrt(correction_2), dtype),
            grad=gradient,
        )

    def get_config(self) -> dict:
        return {**super().get_config(), "decoupled": self.decoupled}
