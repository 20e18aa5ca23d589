"""LARS: each layer's learning rate follows the ratio of the norms of its weight and its gradient."""

from __future__ import annotations

import keras
import tensorflow as tf

from allstep.tensorflow.optimizers.base import is_layer, norm, ratio_of
from allstep.tensorflow.optimizers.sgd import SGD


@keras.saving.register_keras_serializable("allstep")
class LARS(SGD):
    """You et al. 2017, algorithm 1, with the learning rate outside of the velocity, as in `SGD`:

        ratio = 0.001 * |w| / (|g| + decay * |w| + 1e-8)
        m = momentum * m + ratio * (g + decay * w);  w = w - lr * m

    The ratio is 1 where |w| or |g| is 0, and for biases and the scales of norms. At a learning rate that changes this
    is not the paper's velocity, which has the rates of the steps before in it.
    """

    TRUST, EPSILON = 0.001, 1e-8

    def __init__(self, learning_rate: float = 0.0, momentum: float = 0.9, **kwargs) -> None:
        super().__init__(learning_rate, momentum, **kwargs)

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        if is_layer(variable):
            decay, weight_norm, gradient_norm = self.decay_of(variable), norm(variable), norm(gradient)
            ratio = ratio_of(
                self.TRUST * weight_norm,
                gradient_norm + decay * weight_norm + self.EPSILON,
                holds=(weight_norm > 0) & (gradient_norm > 0),
            )
            gradient = ratio * self.with_decay(gradient, variable)
        self.move(gradient, variable, learning_rate)
