"""The gradients of a step with --slices: slice by slice, and added up in one fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from allstep.common.audit import audit
from allstep.common.data.loader import Batch
from allstep.common.replica_check import digest
from allstep.common.slices import TreeSum
from allstep.pytorch.compat import BatchNorm
from allstep.pytorch.strategies.strategy import Strategy


class SlicedStep:
    """What a step does with the slices of this rank, until all ranks have the gradient of the global batch.

    A slice's vector is made of the sum of its losses, its gradients, and the running statistics that batch norms have
    after it; each slice finds those of before the step. The mean over all slices becomes the next ones.
    """

    def __init__(self, network: torch.nn.Module, strategy: Strategy) -> None:
        self._parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        norms = [module for module in network.modules() if isinstance(module, BatchNorm)]
        self._statistics = [buffer for norm in norms for buffer in norm.buffers() if buffer.is_floating_point()]
        self._sum, self._collectives = strategy.ordered_sum(), strategy.collectives
        self._sizes = [1, *(tensor.numel() for tensor in (*self._parameters, *self._statistics))]
        self._padding = self._sum.padding(sum(self._sizes))

    def __call__(self, batch: Batch, one_pass: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Give each parameter its gradient, and batch norms their statistics.

        Args:
            one_pass: takes a slice and `number`, its number; adds its gradients to those of the parameters and returns
                the sum of its losses.

        Returns: the sum of the losses of the global batch.

        Raises:
            UnequalBits: see `audit`.
        """
        sums: TreeSum[torch.Tensor] = TreeSum(self._sum.num_slices)
        digests: dict[int, int] = {}
        for number, vector in self._slices(batch, one_pass):
            if batch.read_slice_of:
                digests[number] = _digest(vector)  # before another one is added to it
            sums.add((number, number + 1), vector)
        if batch.read_slice_of:

            def compute(other: Batch) -> dict[int, int]:
                return {number: _digest(vector) for number, vector in self._slices(other, one_pass)}

            audit(batch, digests, compute, self._collectives, self._sum.num_slices)
        [loss_sum, *tensors] = self._sum(sums.partial)[: sum(self._sizes)].split(self._sizes)
        for parameter, gradient in zip(self._parameters, tensors, strict=False):
            parameter.grad = gradient.view_as(parameter)
        num_with_samples = min(self._sum.num_slices, batch.num_global)
        for statistics, value in zip(self._statistics, tensors[len(self._parameters) :], strict=True):
            statistics.copy_(value.view_as(statistics) / num_with_samples)
        return loss_sum[0]

    def _slices(self, batch: Batch, one_pass: Callable[..., torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        """Number and vector of each slice of a batch."""
        before = [statistics.clone() for statistics in self._statistics]
        for one in batch.slices:
            vector = self._vector(batch.part(one), partial(one_pass, number=one.number))
            for statistics, value in zip(self._statistics, before, strict=True):
                statistics.copy_(value)
            yield one.number, vector

    def _vector(self, part: Batch, one_pass: Callable[[Batch], torch.Tensor]) -> torch.Tensor:
        if not part.num_samples:
            return self._parameters[0].new_zeros(sum(self._sizes) + self._padding)
        for parameter in self._parameters:
            parameter.grad = None
        loss_sum = one_pass(part)
        gradients = [
            # A slice may leave a part of a network unused.
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in self._parameters
        ]
        tensors = (*gradients, *self._statistics, loss_sum.new_zeros(self._padding))
        return torch.cat([loss_sum.view(1), *(tensor.reshape(-1) for tensor in tensors)])


def _digest(vector: torch.Tensor) -> int:
    return digest(vector.cpu().numpy())
