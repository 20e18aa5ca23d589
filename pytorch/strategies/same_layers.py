"""Check that all ranks of FSDP use the same layers, in one order.

FSDP gathers a layer's weights when a rank comes to it, and knows them by their turn alone: of two ranks that are at
different layers, each would get a part of the other's weights, which nothing else notices if both have one size.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from allstep.common.base.collectives import Collectives
from allstep.common.base.errors import UserError

_END = -1


class SameLayers:
    """Compares the layers of the first pass with the other ranks', and those of all others with the first one's."""

    def __init__(self, network: torch.nn.Module, layers: Mapping[str, torch.nn.Module], ranks: Collectives) -> None:
        """Follow the passes of a network whose `layers` are gathered one by one; call it after `fully_shard`."""
        self._names, self._ranks = [*layers], ranks
        self._parameters = dict(network.named_parameters())
        self._used, self._first = list[int](), dict[bool, list[int]]()
        self._missing: list[bool] | None = None
        if ranks.world_size > 1:
            network.register_forward_pre_hook(lambda *_: self._used.clear(), prepend=True)
            for number, layer in enumerate(layers.values()):
                layer.register_forward_pre_hook(lambda *_, number=number: self._see(number), prepend=True)
            network.register_forward_hook(lambda *_: self._end_forward())

    def end_pass(self) -> None:
        """End a training pass, in whose backward part --recompute uses layers again.

        Raises:
            UserError: this rank has not used those of the first one.
        """
        if self._ranks.world_size > 1:
            self._see(_END)
            self._first.setdefault(True, [*self._used])

    def check_gradients(self) -> None:
        """Compare which parameters have no gradient before the optimizer sees the others.

        Raises:
            UserError: they are not those of the first step, or of another rank.
        """
        missing = [one.requires_grad and one.grad is None for one in self._parameters.values()]
        if self._missing is None:
            counts = self._ranks.all_reduce_sum(np.array(missing, np.float64))
            self._missing = [bool(count) for count in counts]
        for name, one, other in zip(self._parameters, missing, self._missing, strict=True):
            if one != other and self._parameters[name].requires_grad and self._ranks.world_size > 1:
                raise _refused(name)

    def _see(self, number: int) -> None:
        """Note a layer before its weights are gathered."""
        place, kind = len(self._used), torch.is_grad_enabled()
        if kind in self._first:
            expected = self._first[kind][place : place + 1]
        else:
            expected = {int(other) for [other] in self._ranks.all_gather(np.array([number]))}
        if {number} != set(expected):
            raise _refused(self._names[max({number, *expected})])
        self._used.append(number)

    def _end_forward(self) -> None:
        self._see(_END)
        if not torch.is_grad_enabled():
            self._first.setdefault(False, [*self._used])


def _refused(name: str) -> UserError:
    return UserError(
        f"--strategy fsdp needs the same layers in all passes on all ranks, {name} is used in some alone; give "
        "--slices of at least as many as there are ranks, or --strategy ddp --find-unused-parameters"
    )
