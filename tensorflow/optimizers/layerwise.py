"""Optimizers whose update of a layer follows all of its weights: norms, or orthogonal matrices (Muon).

`pytorch/optimizers/layerwise.py` has the formulas.
"""

import math
from typing import cast

import keras
import tensorflow as tf

from allstep.tensorflow.compat import is_in_xla, momentary_variable, variable_index
from allstep.tensorflow.optimizers.base import is_embedding, is_layer, norm, ratio_of
from allstep.tensorflow.optimizers.elementwise import SGD, Adam, AdamKernel


@keras.saving.register_keras_serializable("allstep")
class LARS(SGD):
    """LARS; the ratio is 1 where a norm is 0, and for biases and the scales of norms."""

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


@keras.saving.register_keras_serializable("allstep")
class LAMB(AdamKernel):
    """LAMB; the ratio is 1 where a norm is 0, and for biases and the scales of norms.

    `keras.optimizers.Lamb` differs from the paper: the decay is outside of the update, and all weights have ratios.
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
        """Return the update u of the formula, by Adam's kernel on a temporary variable that starts as decay * w."""
        decayed = self.decay_of(variable) * variable
        if not is_in_xla():
            with tf.device(variable.device):
                moved = momentary_variable(decayed)
                self.apply_adam(gradient, variable, moved=moved, rate=-correction, epsilon=epsilon)
                return tf.raw_ops.ReadVariableOp(resource=moved, dtype=variable.dtype)
        # XLA has no temporary variables. At rate 0, the kernel updates the moments and leaves the weight.
        self.apply_adam(gradient, variable, moved=variable.handle, rate=tf.zeros_like(correction), epsilon=epsilon)
        mean, mean_of_squares = (self.slot(name, variable) for name in self.slot_names)
        return correction * mean / (tf.sqrt(mean_of_squares) + epsilon) + decayed


@keras.saving.register_keras_serializable("allstep")
class NovoGrad(SGD):
    """NovoGrad; biases and the scales of norms do not decay."""

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


@keras.saving.register_keras_serializable("allstep")
class Muon(Adam):
    """Jordan et al. 2024, with the scale of Liu et al. 2025, "Muon is Scalable for LLM Training", equation 4:

        m = 0.95 * m + 0.05 * g;  u = 0.05 * g + 0.95 * m
        w = w - lr * decay * w - lr * 0.2 * sqrt(max(rows, columns)) * orthogonal(u)

    `keras.optimizers.Muon` has this formula, and torch.optim.Muon with adjust_lr_fn="match_rms_adamw", but in bfloat16.
    AdamW updates weights without two axes, and, as in Keras, those of embeddings.
    """

    MOMENTUM = 0.95

    def __init__(self, learning_rate: float = 0.0, **kwargs) -> None:
        super().__init__(learning_rate, decoupled=True, **kwargs)

    def build(self, variables: list[keras.Variable]) -> None:
        if self.built:
            return
        keras.Optimizer.build(self, variables)
        are_matrices = [len(one.shape) == 2 and not is_embedding(one) for one in variables]
        self.slots = {
            slot: [
                self.add_variable_from_reference(one, name=slot) if is_matrix == (slot == "momentum") else None
                for one, is_matrix in zip(variables, are_matrices, strict=True)
            ]
            for slot in ("momentum", *self.slot_names)
        }

    def update_step(
        self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tuple[tf.Tensor, tf.Tensor, tf.Tensor]
    ) -> None:
        if self.slots["momentum"][variable_index(self, variable)] is None:
            super().update_step(gradient, variable, learning_rate)
            return
        rate, average = tf.cast(learning_rate[0], variable.dtype), self.slot("momentum", variable)
        average.assign_add((1 - self.MOMENTUM) * (gradient - average))
        update = orthogonal((1 - self.MOMENTUM) * gradient + self.MOMENTUM * average)
        if decay := self.decay_of(variable):
            variable.assign_sub(rate * decay * variable)
        variable.assign_sub(rate * (0.2 * math.sqrt(max(_sides(variable)))) * update)

    def get_config(self) -> dict:
        config = super().get_config()
        del config["decoupled"]
        return config


def orthogonal(matrix: tf.Tensor) -> tf.Tensor:
    """Return about U V^T for a matrix U S V^T, by five steps of a Newton-Schulz iteration (Jordan et al. 2024)."""
    rows, columns = _sides(matrix)
    is_high = rows > columns
    wide = tf.transpose(matrix) if is_high else matrix
    wide = wide / tf.maximum(norm(wide), 1e-7)
    for _ in range(5):
        square = tf.matmul(wide, wide, transpose_b=True)
        wide = 3.4445 * wide + tf.matmul(-4.7750 * square + 2.0315 * tf.matmul(square, square), wide)
    return tf.transpose(wide) if is_high else wide


def _sides(matrix: tf.Tensor | tf.Variable) -> list[int]:
    return cast("list[int]", matrix.shape.as_list())
