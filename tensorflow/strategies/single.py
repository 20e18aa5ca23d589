"""One process, one device: the curve that every other strategy must equal."""

import keras

from allstep.common.base.collectives import OneRank
from allstep.tensorflow.strategies.strategy import Strategy


class Single(Strategy):
    """The five steps without other ranks."""

    def init(self) -> None:
        self.choose_device()
        self.collectives = OneRank()

    def broadcast(self, model: keras.Model, optimizer: keras.Optimizer) -> None:
        """4. Nothing to do: there are no other ranks."""
