"""Muon: momentum with orthogonalised matrices, and AdamW for all other weights."""

import math
from typing import cast

import keras
import tensorflow as tf

from allstep.tensorflow.compat import variable_index
from allstep.tensorflow.optimizers.base import is_embedding, norm
from allstep.tensorflow.optimizers.elementwise import Adam


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
