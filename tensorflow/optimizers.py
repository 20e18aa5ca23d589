"""The optimizers by the names of `--optimizer`, with the formulas of `pytorch/optimizers.py`.

Keras' own differ from PyTorch's in three places: SGD keeps the learning rate inside its velocity, weight decay is
always decoupled from the gradient, and Adam adds epsilon before it corrects the bias. These here give the same
curve as torch.optim's; each is one fused kernel a variable.
"""

from __future__ import annotations

from typing import cast

import keras
import tensorflow as tf

from allstep.common.config.train_config import OptimizerConfig
from allstep.tensorflow.compat import variable_index


def build_optimizer(config: OptimizerConfig) -> keras.Optimizer:
    """The configured optimizer; the engine sets its learning rate before every step."""
    if config.optimizer in ("sgd", "nesterov"):
        return SGD(momentum=config.momentum, nesterov=config.optimizer == "nesterov", l2=config.weight_decay)
    if config.optimizer == "adam":
        return Adam(l2=config.weight_decay)
    return Adam(weight_decay=config.weight_decay or None)  # Keras' decay is that of AdamW


@keras.saving.register_keras_serializable("allstep")
class SGD(keras.Optimizer):
    """m = momentum * m + g; w = w - lr * m, with g + momentum * m for m under Nesterov (Sutskever et al. 2013)."""

    def __init__(
        self, learning_rate: float = 0.0, momentum: float = 0.0, nesterov: bool = False, l2: float = 0.0, **kwargs
    ) -> None:
        """`l2` times the weight is added to the gradient before anything else."""
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.momentum, self.nesterov, self.l2 = momentum, nesterov, l2

    def build(self, variables: list[keras.Variable]) -> None:
        if not self.built:
            super().build(variables)
            momenta = self.add_optimizer_variables(variables, "momentum") if self.momentum else []
            # Of one name Keras makes one list, of several a tuple of lists: its types do not say when which.
            self.slots = {"momentum": cast("list[keras.Variable]", momenta)} if self.momentum else {}

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        rate, gradient = tf.cast(learning_rate, variable.dtype), _with_l2(gradient, variable, self.l2)
        if not self.momentum:
            tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient)
            return
        tf.raw_ops.ResourceApplyMomentum(
            var=variable.handle,
            accum=self.slots["momentum"][variable_index(self, variable)].value.handle,
            lr=rate,
            grad=gradient,
            momentum=tf.constant(self.momentum, variable.dtype),
            use_nesterov=self.nesterov,
        )

    def get_config(self) -> dict:
        return {**super().get_config(), "momentum": self.momentum, "nesterov": self.nesterov, "l2": self.l2}


@keras.saving.register_keras_serializable("allstep")
class Adam(keras.Optimizer):
    """Adam (Kingma and Ba 2015, algorithm 1) and, with `weight_decay`, AdamW (Loshchilov and Hutter 2019)."""

    BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8

    def __init__(self, learning_rate: float = 0.0, l2: float = 0.0, **kwargs) -> None:
        """`l2` times the weight is added to the gradient before anything else."""
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.l2 = l2

    def build(self, variables: list[keras.Variable]) -> None:
        if not self.built:
            super().build(variables)
            names = ["exp_avg", "exp_avg_sq"]
            self.slots = dict(zip(names, self.add_optimizer_variables(variables, names), strict=True))

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        index, dtype = variable_index(self, variable), variable.dtype
        step = tf.cast(cast("keras.Variable", self.iterations).value + 1, tf.float64)
        correction_1, correction_2 = 1 - self.BETA_1**step, 1 - self.BETA_2**step
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=self.slots["exp_avg"][index].value.handle,
            v=self.slots["exp_avg_sq"][index].value.handle,
            beta1_power=tf.cast(1 - correction_1, dtype),
            beta2_power=tf.cast(1 - correction_2, dtype),
            lr=tf.cast(learning_rate, dtype),
            beta1=tf.constant(self.BETA_1, dtype),
            beta2=tf.constant(self.BETA_2, dtype),
            # The kernel divides by sqrt(v) + epsilon where the paper has sqrt(v / correction_2) + epsilon.
            epsilon=tf.cast(self.EPSILON * tf.sqrt(correction_2), dtype),
            grad=_with_l2(gradient, variable, self.l2),
        )

    def get_config(self) -> dict:
        return {**super().get_config(), "l2": self.l2}


def _with_l2(gradient: tf.Tensor, variable: tf.Variable, l2: float) -> tf.Tensor:
    gradient = tf.cast(gradient, variable.dtype)
    return gradient + l2 * variable if l2 else gradient
