"""A moving average of the weights, for validation and for checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from allstep.pytorch.compat import move_towards
from allstep.pytorch.optimizers.layers import local


class WeightAverage:
    """a = w after the first step, a = decay * a + (1 - decay) * w after each other one (Polyak and Juditsky 1992).

    `tensorflow/averaging.py` has the same. Running statistics of batch norms are not averaged: they are averages.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], decay: float) -> None:
        """`parameters` are this rank's by canonical name."""
        self._parameters, self._decay = parameters, decay
        self.averages: dict[str, torch.Tensor] = {}
        """By the same names; none before the first step."""

    def update(self) -> None:
        """Take account of a step of the optimizer."""
        if not self.averages:
            self.averages = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
            return
        averages, weights = local(self.averages.values()), local(self._parameters.values())
        move_towards(averages, [weight.detach() for weight in weights], 1 - self._decay)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Within it the network has the averages, and they are where its weights were."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, parameter in self._parameters.items():
            [weight], [average] = local([parameter]), local([self.averages[name]])
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
