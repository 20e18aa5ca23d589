"""One process, one device: what every other strategy has to equal."""

from __future__ import annotations

import torch

from allstep.common.base.collectives import OneRank
from allstep.pytorch.strategies.strategy import Strategy


class Single(Strategy):
    """The five steps without other ranks."""

    def init(self) -> None:
        self.choose_device()
        self.collectives = OneRank()

    def wrap(
        self, network: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        return self.compiled(network), optimizer

    def broadcast(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """4. There is nobody else."""
