"""Adam and AdamW."""

from __future__ import annotations

import keras
import tensorflow as tf

from allstep.tensorflow.optimizers.base import Optimizer


class AdamKernel(Optimizer):
    """Base of optimizers that keep Adam's two moments, updated by one fused kernel per variable."""

    BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8
    slot_names = ("exp_avg", "exp_avg_sq")

    def rates(self, learning_rate: tf.Tensor, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The learning rate, and for the kernel the factor that corrects the bias of both moments, and epsilon.

        The kernel divides by sqrt(v) + epsilon where the paper has sqrt(v / correction_2) + epsilon. Its own correction
        is 1 - beta^t in the weight's type, which in float32 has 3 digits at first. It is right for the betas that this
        type has.
        """
        step, betas = tf.cast(self.num_steps + 1, tf.float64), (self.BETA_1, self.BETA_2)
        correction_1, correction_2 = (1 - tf.pow(tf.cast(tf.constant(beta, dtype), tf.float64), step) for beta in betas)
        root = tf.sqrt(correction_2)
        return learning_rate, tf.cast(root / correction_1, dtype), tf.cast(self.EPSILON * root, dtype)

    def apply_adam(
        self, gradient: tf.Tensor, variable: tf.Variable, *, moved: tf.Tensor, rate: tf.Tensor, epsilon: tf.Tensor
    ) -> None:
        """Adam's step of the variable that `moved` is a handle of, with the moments of `variable`."""
        dtype = variable.dtype
        tf.raw_ops.ResourceApplyAdam(
            var=moved,
            m=self.slot("exp_avg", variable).handle,
            v=self.slot("exp_avg_sq", variable).handle,
            beta1_power=tf.zeros((), dtype),
            beta2_power=tf.zeros((), dtype),
            lr=rate,
            beta1=tf.constant(self.BETA_1, dtype),
            beta2=tf.constant(self.BETA_2, dtype),
            epsilon=epsilon,
            grad=gradient,
        )


@keras.saving.register_keras_serializable("allstep")
class Adam(AdamKernel):
    """Adam (Kingma and Ba 2015, algorithm 1), with the decay in the gradient; `decoupled`, AdamW (Loshchilov and
    Hutter 2019), where the weight itself decays by lr * decay.

    Keras' own adds epsilon before it corrects the bias.
    """

    def __init__(self, learning_rate: float = 0.0, decoupled: bool = False, **kwargs) -> None:
        super().__init__(learning_rate, **kwargs)
        self.decoupled = decoupled

    def update_step(
        self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tuple[tf.Tensor, tf.Tensor, tf.Tensor]
    ) -> None:
        rate, correction, epsilon = (tf.cast(number, variable.dtype) for number in learning_rate)
        if not self.decoupled:
            gradient = self.with_decay(gradient, variable)
        elif decay := self.decay_of(variable):
            variable.assign_sub(rate * decay * variable)
        self.apply_adam(gradient, variable, moved=variable.handle, rate=rate * correction, epsilon=epsilon)

    def get_config(self) -> dict:
        return {**super().get_config(), "decoupled": self.decoupled}
