"""Adagrad."""

from __future__ import annotations

import keras
import tensorflow as tf

from allstep.tensorflow.optimizers.base import Optimizer


@keras.saving.register_keras_serializable("allstep")
class Adagrad(Optimizer):
    """Duchi et al. 2011 in torch's form: s = s + g^2; w = w - lr * g / (sqrt(s) + 1e-10), with the decay in g.

    One fused kernel a variable. Keras' own starts with s = 0.1, and has epsilon = 1e-7 under the root.
    """

    EPSILON = 1e-10
    slot_names = ("sum_of_squares",)

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        tf.raw_ops.ResourceApplyAdagradV2(
            var=variable.handle,
            accum=self.slot("sum_of_squares", variable).handle,
            lr=tf.cast(learning_rate, variable.dtype),
            epsilon=tf.constant(self.EPSILON, variable.dtype),
            grad=self.with_decay(gradient, variable),
        )
