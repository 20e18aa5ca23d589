"""One process, one device: what every other strategy has to equal."""

from __future__ import annotations

import keras
import tensorflow as tf

from allstep.common.base.collectives import OneRank
from allstep.tensorflow.strategies.strategy import Strategy


class Single(Strategy):
    """The five steps without other ranks."""

    def init(self) -> None:
        self.choose_device()
        self.collectives = OneRank()

    def wrap(self, model: keras.Model, optimizer: keras.Optimizer) -> tuple[keras.Model, keras.Optimizer]:
        apply = optimizer.apply

        def apply_at_once(grads: list[tf.Tensor], trainable_variables: list[keras.Variable] | None = None) -> None:
            self.compiled(lambda gradients: apply(gradients, trainable_variables))(grads)

        if self.flags.compile and not self.flags.slices:  # whose updates are alike under every strategy
            optimizer.apply = apply_at_once  # pyright: ignore[reportAttributeAccessIssue]
        return model, optimizer

    def broadcast(self, model: keras.Model, optimizer: keras.Optimizer) -> None:
        """4. There is nobody else."""
