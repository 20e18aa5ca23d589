"""Muon: momentum whose matrices are made orthogonal, and AdamW for all that is no matrix."""

from __future__ import annotations

import math
from typing import cast

import keras
import tensorflow as tf

from allstep.common.config.train_config import muon_slots
from allstep.tensorflow.optimizers.adam import Adam
from allstep.tensorflow.optimizers.base import norm


@keras.saving.register_keras_serializable("allstep")
class Muon(Adam):
    """Jordan et al. 2024, with the scale of Liu et al. 2025, "Muon is Scalable for LLM Training", equation 4:

        m = 0.95 * m + 0.05 * g;  u = 0.05 * g + 0.95 * m
        w = w - lr * decay * w - lr * 0.2 * sqrt(max(rows, columns)) * orthogonal(u)

    `keras.optimizers.Muon` has this formula, and torch.optim.Muon with adjust_lr_fn="match_rms_adamw", but in bfloat16.
    Weights that have not two axes are updated by AdamW; Keras' also takes it for embeddings.
    """

    MOMENTUM = 0.95

    def __init__(self, learning_rate: float = 0.0, **kwargs) -> None:
        super().__init__(learning_rate, decoupled=True, **kwargs)

    def build(self, variables: list[keras.Variable]) -> None:
        if self.built:
            return
        keras.Optimizer.build(self, variables)
        self.slots = {
            slot: [
                self.add_variable_from_reference(one, name=slot) if slot in muon_slots(len(one.shape)) else None
                for one in variables
            ]
            for slot in ("momentum", "exp_avg", "exp_avg_sq")
        }

    def update_step(
        self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tuple[tf.Tensor, tf.Tensor, tf.Tensor]
    ) -> None:
        if len(variable.shape) != 2:
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
