"""One process, one device: what every other strategy has to equal."""

from __future__ import annotations

import keras

from allstep.common.collectives import OneRank
from allstep.tensorflow.strategies.strategy import Strategy


class Single(Strategy):
    """The five steps without other ranks."""

    def init(self) -> None:
        self.choose_device()
        self.collectives = OneRank()

    def wrap(self, model: keras.Model, optimizer: keras.Optimizer) -> tuple[keras.Model, keras.Optimizer]:
        return model, optimizer

    def broadcast(self, model: keras.Model, optimizer: keras.Optimizer) -> None:
        """4. There is nobody else."""
