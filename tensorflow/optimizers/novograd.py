"""NovoGrad: SGD with momentum on gradients that are divided, layer by layer, by the running size of their norm."""

from __future__ import annotations

import keras
import tensorflow as tf

from allstep.tensorflow.optimizers.sgd import SGD


@keras.saving.register_keras_serializable("allstep")
class NovoGrad(SGD):
    """Ginsburg et al. 2019, algorithm 1, for weights and, without decay, for biases and the scales of norms:

        v = 0.98 * v + 0.02 * |g|^2, but |g|^2 where v is 0, as it is in the first step
        m = 0.95 * m + c * (g / (sqrt(v) + 1e-8) + decay * w);  w = w - lr * m

    c is 1, or 0.05 with `grad_averaging`, which the paper has as a variant.
    """

    BETA_1, BETA_2, EPSILON = 0.95, 0.98, 1e-8

    def __init__(self, learning_rate: float = 0.0, grad_averaging: bool = False, **kwargs) -> None:
        super().__init__(learning_rate, momentum=self.BETA_1, **kwargs)
        self.grad_averaging = grad_averaging

    def build(self, variables: list[keras.Variable]) -> None:
        if self.built:
            return
        super().build(variables)
        self.slots["layer_exp_avg_sq"] = [self._number_beside(variable) for variable in variables]

    def _number_beside(self, variable: keras.Variable) -> keras.Variable:
        with self._distribution_strategy.extended.colocate_vars_with(variable.value):
            name = f"{variable.path.replace('/', '_')}_layer_exp_avg_sq"
            return self.add_variable((), dtype=variable.dtype, name=name)

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        running, square = self.slot("layer_exp_avg_sq", variable), 2 * tf.nn.l2_loss(gradient)
        value = tf.where(running == 0, square, self.BETA_2 * running + (1 - self.BETA_2) * square)
        running.assign(value)
        size = tf.sqrt(value) + self.EPSILON
        if decay := self.decay_of(variable):
            gradient += decay * size * variable
        self.move((1 - self.BETA_1 if self.grad_averaging else 1.0) / size * gradient, variable, learning_rate)

    def get_config(self) -> dict:
        config = super().get_config()
        del config["momentum"], config["nesterov"]
        return {**config, "grad_averaging": self.grad_averaging}
