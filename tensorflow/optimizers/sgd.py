"""SGD with momentum."""

from __future__ import annotations

import keras
import tensorflow as tf

from allstep.tensorflow.optimizers.base import Optimizer


@keras.saving.register_keras_serializable("allstep")
class SGD(Optimizer):
    """m = momentum * m + g + decay * w; w = w - lr * m, with g + momentum * m for m under Nesterov.

    Sutskever et al. 2013 in torch's form, one fused kernel a variable; Keras' own has the learning rate in m.
    """

    def __init__(self, learning_rate: float = 0.0, momentum: float = 0.0, nesterov: bool = False, **kwargs) -> None:
        super().__init__(learning_rate, **kwargs)
        self.momentum, self.nesterov = momentum, nesterov
        self.slot_names = ("momentum",) if momentum else ()

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        self.move(self.with_decay(gradient, variable), variable, learning_rate)

    def move(self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        """The step of a gradient that has the decay in it."""
        rate = tf.cast(learning_rate, variable.dtype)
        if not self.momentum:
            tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient)
            return
        tf.raw_ops.ResourceApplyMomentum(
            var=variable.handle,
            accum=self.slot("momentum", variable).handle,
            lr=rate,
            grad=gradient,
            momentum=tf.constant(self.momentum, variable.dtype),
            use_nesterov=self.nesterov,
        )

    def get_config(self) -> dict:
        return {**super().get_config(), "momentum": self.momentum, "nesterov": self.nesterov}
