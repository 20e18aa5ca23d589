"""One process, one device: the curve that every other strategy must equal."""

import torch

from allstep.common.base.collectives import OneRank
from allstep.pytorch.strategies.strategy import Strategy


class Single(Strategy):
    """The five steps without other ranks."""

    def init(self) -> None:
        self.choose_device()
        self.collectives = OneRank()

    def broadcast(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """4. Nothing to do: there are no other ranks."""
