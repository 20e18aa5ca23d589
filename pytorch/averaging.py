"""A moving average of the weights, for validation and for checkpoints. `tensorflow/averaging.py` has the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from allstep.pytorch.compat import move_towards
from allstep.pytorch.kept.network_state import can_train
from allstep.pytorch.observer import Observer
from allstep.pytorch.optimizers.layers import local


class WeightAverage(Observer):
    """a = w after the first step, a = decay * a + (1 - decay) * w after each other one (Polyak and Juditsky 1992).

    Running statistics of batch norms are not averaged: they are averages.
    """

    def __init__(self, network: torch.nn.Module, decay: float) -> None:
        parameters = {name: one for name, one in network.named_parameters() if can_train(one)}
        self._all = {f"ema/{name}": parameter for name, parameter in parameters.items()}
        self._own = {name: parameter for name, parameter in self._all.items() if not parameter.is_meta}
        self._decay = decay
        self.state: dict[str, torch.Tensor] = {}

    def kept(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self._all.items()

    def see_updates(self) -> None:
        if not self.state:
            self.state = {name: parameter.detach().clone() for name, parameter in self._own.items()}
            return
        averages, weights = local(self.state.values()), local(self._own.values())
        move_towards(averages, [weight.detach() for weight in weights], 1 - self._decay)

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, parameter in self._own.items():
            [weight], [average] = local([parameter]), local([self.state[name]])
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
