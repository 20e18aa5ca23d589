"""One process, one device: what every other strategy has to equal."""

from __future__ import annotations

import keras
import tensorflow as tf

from allstep.common.collectives import OneRank
from allstep.tensorflow.strategies.strategy import Strategy


class Single(Strategy):
    """The five steps without other ranks."""

    def init(self) -> None:
        self.collectives = OneRank()

    def wrap(self, model: keras.Model, optimizer: keras.Optimizer) -> tuple[keras.Model, keras.Optimizer]:
        apply = optimizer.apply

        def apply_at_once(gradients: list[tf.Tensor], variables: list[keras.Variable]) -> None:
            self.compiled(lambda gradients: apply(gradients, variables))(gradients)

        if self.flags.compile:
            optimizer.apply = apply_at_once  # pyright: ignore[reportAttributeAccessIssue]
        return model, optimizer

    def broadcast(self, model: keras.Model, optimizer: keras.Optimizer) -> None:
        """4. There is nobody else."""
