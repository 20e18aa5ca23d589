"""Forward and backward passes over a batch: one after another, as many as --accumulate-steps asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol

import torch

from allstep.common.catalog.network_outputs import no_gradient
from allstep.common.data.loader import Batch
from allstep.common.data.sharding import rank_slice
from allstep.pytorch.kept.pass_state import to_repeat
from allstep.pytorch.losses import Measure
from allstep.pytorch.observer import Observer, observed
from allstep.pytorch.strategies.batch_norm import uncounted

if TYPE_CHECKING:
    from allstep.pytorch.inputs import Inputs
    from allstep.pytorch.precision import Precision

Scored = tuple[float, torch.Tensor | None]
"""Sum of the losses and the outputs of some samples; 0 and None if another rank has them."""


@dataclasses.dataclass(frozen=True)
class TrainPass:
    """A forward and a backward pass of one rank."""

    model: torch.nn.Module
    """The model that the strategy's `wrap` returned."""
    loss: Measure

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor, loss_weight: float) -> torch.Tensor:
        """Add the gradients of the weighted sum of losses to those of `model`; return the sum of the losses."""
        loss_sum = self.loss(self.model(inputs), targets)
        if not loss_sum.requires_grad:
            raise no_gradient()
        # loss_sum.backward(weight) would save an operation, but imports SymPy, which takes a third of a second.
        (loss_sum * loss_weight).backward()
        return loss_sum.detach()


class ReducedPass(Protocol):
    """A `TrainPass` whose gradients a strategy combines with those of other ranks."""

    def __call__(
        self, inputs: torch.Tensor, targets: torch.Tensor, loss_weight: float, *, is_last: bool
    ) -> torch.Tensor:
        """Run the pass; gradients are combined over ranks if `is_last`, before the optimizer's step."""
        ...


@dataclasses.dataclass(frozen=True)
class EvalPass:
    """A forward pass and its loss."""

    model: torch.nn.Module
    loss: Measure

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor) -> Scored:
        return self.score(self.model(inputs), targets)

    def score(self, outputs: torch.Tensor, targets: torch.Tensor) -> Scored:
        """Return the sum of the losses, and the outputs."""
        return float(self.loss(outputs, targets)), outputs


@dataclasses.dataclass(frozen=True)
class Passes:
    """The backward part of a step without --slices: passes whose gradients add up in the parameters."""

    number: int
    network: torch.nn.Module
    one_pass: ReducedPass
    inputs: Inputs
    precision: Precision
    observers: Sequence[Observer]

    def __call__(self, batch: Batch, loss_scale: float, num_steps: int) -> torch.Tensor:
        loss_sums, repeat = [], to_repeat(self.network) if self.number > 1 else None
        for number in range(self.number):
            if repeat and number:
                repeat()
            begin, end = rank_slice(0, len(batch.inputs), rank=number, world_size=self.number)
            # All ranks need the same number of passes, so one without samples runs on a sample of weight 0.
            inputs, targets = self.inputs(batch, begin, max(end, begin + 1))
            loss_weight = batch.loss_weight * loss_scale if end > begin else 0.0
            statistics = nullcontext() if loss_weight else uncounted(self.network)
            with self.precision.computing(), statistics, observed(self.observers, 0, loss_weight * (end - begin)):
                loss_sum = self.one_pass(inputs, targets, loss_weight, is_last=number == self.number - 1)
            if loss_weight:
                loss_sums.append(loss_sum)
        return sum(loss_sums[1:], loss_sums[0]) if loss_sums else torch.zeros(())
