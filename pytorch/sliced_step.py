"""The gradients of a step with --slices: slice by slice, and added up in one fixed order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch

from allstep.common.audit import audit
from allstep.common.data.loader import Batch
from allstep.common.replica_check import digest
from allstep.common.slices import TreeSum
from allstep.pytorch.compat import BatchNorm
from allstep.pytorch.optimizers.layers import local
from allstep.pytorch.strategies.strategy import Strategy

_ALIGNMENT = 16
"""A tensor begins at a multiple of so many elements of a vector: on a GPU its norm depends on where it lies."""


class SlicedStep:
    """What a step does with the slices of this rank, until all ranks have the gradient of the global batch.

    A slice's vector is made of the sum of its losses, the running statistics that batch norms have after it, and its
    gradients; each slice finds the statistics of before the step. The mean over all slices becomes the next ones.
    Where ranks keep shards of the weights, the vector has a part for each rank: the same, but of its shards alone.
    """

    def __init__(self, network: torch.nn.Module, strategy: Strategy) -> None:
        self._network, self._strategy = network, strategy
        self._parameters = _trainable(network)
        norms = [module for module in network.modules() if isinstance(module, BatchNorm)]
        self._statistics = [buffer for norm in norms for buffer in norm.buffers() if buffer.is_floating_point()]
        self._sum, self._collectives = strategy.ordered_sum(), strategy.collectives
        num_parts, first = self._sum.num_parts, [1, *(tensor.numel() for tensor in self._statistics)]
        # The first ranks have as many rows of a weight, the last ones fewer or none.
        shapes = [tuple(parameter.shape) or (1,) for parameter in self._parameters]
        most = [-(-rows // num_parts) * math.prod(row) for rows, *row in shapes]
        self._part_size = sum(map(_aligned, (*first, *most)))
        self._part_size += self._sum.padding(self._part_size)
        self._sizes = [*first, *(tensor.numel() for tensor in local(self._parameters))]

    def __call__(self, batch: Batch, one_pass: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Give each parameter its gradient, and batch norms their statistics.

        Args:
            one_pass: takes a slice and `number`, its number; adds its gradients to those of the parameters and returns
                the sum of its losses.

        Returns: the sum of the losses of the global batch.

        Raises:
            UnequalBits: see `audit`.
        """
        with self._strategy.whole_weights():
            sums = self._sum_of_own(batch, one_pass)
        loss_sum, *tensors = _split(self._sum(sums.partial), self._sizes)
        num_with_samples = min(self._sum.num_slices, batch.num_global)
        for statistics, value in zip(self._statistics, tensors, strict=False):
            statistics.copy_(value.view_as(statistics) / num_with_samples)
        for parameter, gradient in zip(self._parameters, tensors[len(self._statistics) :], strict=True):
            parameter.grad = self._strategy.as_gradient(gradient, parameter)
        return loss_sum[0]

    def _sum_of_own(self, batch: Batch, one_pass: Callable[..., torch.Tensor]) -> TreeSum[torch.Tensor]:
        """The sum of the vectors of this rank's slices, as far as the tree goes."""
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
        return sums

    def _slices(self, batch: Batch, one_pass: Callable[..., torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        """Number and vector of each slice of a batch."""
        before = [statistics.clone() for statistics in self._statistics]
        weights = _trainable(self._network)
        for one in batch.slices:
            vector = self._vector(batch.part(one), weights, partial(one_pass, number=one.number))
            for statistics, value in zip(self._statistics, before, strict=True):
                statistics.copy_(value)
            yield one.number, vector

    def _vector(
        self, part: Batch, weights: Sequence[torch.nn.Parameter], one_pass: Callable[[Batch], torch.Tensor]
    ) -> torch.Tensor:
        if not part.num_samples:
            return weights[0].new_zeros(self._sum.num_parts * self._part_size)
        loss_sum = one_pass(part)
        # A slice may leave a part of a network unused.
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in weights]
        for weight in weights:
            weight.grad = None
        shards = itertools.zip_longest(*(torch.atleast_1d(one).chunk(self._sum.num_parts) for one in gradients))
        parts = [(loss_sum, *self._statistics, *(one for one in own if one is not None)) for own in shards]
        parts += [(loss_sum, *self._statistics)] * (self._sum.num_parts - len(parts))
        return torch.cat([piece for tensors in parts for piece in self._pieces(tensors)])

    def _pieces(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """A part of a vector, in pieces of one axis: the tensors, each with what it lacks to a multiple."""
        size = 0
        for tensor in tensors:
            yield tensor.reshape(-1)
            if padding := -tensor.numel() % _ALIGNMENT:
                yield tensor.new_zeros(padding)
            size += _aligned(tensor.numel())
        yield tensor.new_zeros(self._part_size - size)


def _trainable(network: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in network.parameters() if parameter.requires_grad]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _split(vector: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """The tensors of a part of a vector."""
    ends = itertools.accumulate(map(_aligned, sizes), initial=0)
    return [vector[begin : begin + size] for begin, size in zip(ends, sizes, strict=False)]


def _digest(vector: torch.Tensor) -> int:
    return digest(vector.cpu().numpy())
