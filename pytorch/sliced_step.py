"""The gradients of a step with --slices: slice by slice, and added up in one fixed order.

The gradients are cut into buckets, as those of DDP are, in the order in which a backward pass has them. The sum of a
bucket over all ranks begins when the last slice of this rank has its gradients in it, beside the rest of the backward
pass. A sum goes element by element, so its bits do not depend on the buckets.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from allstep.common.base.digest import digest
from allstep.common.base.errors import UserError
from allstep.common.data.loader import Batch, Slice
from allstep.common.data.slices import Node, TreeSum
from allstep.common.exact.audit import audit
from allstep.pytorch.compat import BatchNorm
from allstep.pytorch.optimizers.layers import local
from allstep.pytorch.step_trace import StepTrace, tensor_digest
from allstep.pytorch.strategies.ordered_sum import SumsUnderWay
from allstep.pytorch.strategies.strategy import Strategy

_ALIGNMENT = 16
"""A tensor begins at a multiple of so many elements of a vector: on a GPU its norm depends on where it lies."""
_FIRST_BUCKET, _BUCKET = 1.0, 25.0
"""Megabytes: DDP's own. The first one is small so that something is on its way soon."""

Give = Callable[[int, int, torch.Tensor], None]
"""Takes the number of a slice, that of a bucket, and what the slice has in it."""


@dataclass(frozen=True)
class _Bucket:
    """Parameters that follow one another, whose gradients travel together."""

    parameters: slice
    part_size: int
    """Elements of a part of its vector, with what it lacks to a multiple."""
    sizes: list[int]
    """Elements of each of this rank's tensors in it."""


class SlicedStep:
    """What a step does with the slices of this rank, until all ranks have the gradient of the global batch.

    A bucket's vector is made of a slice's gradients; in the last bucket, the sum of its losses and the running
    statistics that batch norms have after it come before them. Each slice finds the statistics of before the step; the
    mean over all slices becomes the next ones. Where ranks keep shards of the weights, a vector has a part for each
    rank: the same, but of its shards alone.
    """

    trace: StepTrace | None = None
    """What looks at the slices of each step, where --trace wants it."""

    def __init__(self, network: torch.nn.Module, strategy: Strategy) -> None:
        self._network, self._strategy = network, strategy
        self._parameters = _trainable(network)
        norms = [module for module in network.modules() if isinstance(module, BatchNorm)]
        self._statistics = [buffer for norm in norms for buffer in norm.buffers() if buffer.is_floating_point()]
        self._sum, self._collectives = strategy.ordered_sum(), strategy.collectives
        megabytes, given = [_FIRST_BUCKET, _BUCKET], strategy.flags.bucket_size
        if strategy.placement.world_size == 1:
            megabytes = [math.inf]
        elif given is not None:
            megabytes = [given]
        num_bytes = [parameter.numel() * parameter.element_size() for parameter in self._parameters]
        self._buckets = [self._bucket(parameters) for parameters in _cut(num_bytes, megabytes)]

    def _bucket(self, parameters: slice) -> _Bucket:
        own, num_parts = self._parameters[parameters], self._sum.num_parts
        first = [1, *(tensor.numel() for tensor in self._statistics)] if parameters.start == 0 else []
        # The first ranks have as many rows of a weight, the last ones fewer or none.
        shapes = [tuple(parameter.shape) or (1,) for parameter in own]
        maximum = [-(-rows // num_parts) * math.prod(row) for rows, *row in shapes]
        part_size = sum(map(_aligned, (*first, *maximum)))
        sizes = [*first, *(tensor.numel() for tensor in local(own))]
        return _Bucket(parameters, part_size + self._sum.padding(part_size), sizes)

    def __call__(self, batch: Batch, one_pass: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Give each parameter its gradient, and batch norms their statistics.

        Args:
            one_pass: takes a slice and `number`, its number; adds its gradients to those of the parameters and returns
                the sum of its losses.

        Returns: the sum of the losses of the global batch.

        Raises:
            UnequalBits: see `audit`.
        """
        sums = SumsUnderWay(self._sum)
        with self._strategy.whole_weights():
            self._add_own(batch, one_pass, sums.begin)
        split = [_split(total, bucket.sizes) for total, bucket in zip(sums.totals(), self._buckets, strict=True)]
        loss_sum, *tensors = itertools.chain(*reversed(split))
        num_with_samples = min(self._sum.num_slices, batch.num_global)
        for statistics, value in zip(self._statistics, tensors, strict=False):
            statistics.copy_(value.view_as(statistics) / num_with_samples)
        for parameter, gradient in zip(self._parameters, tensors[len(self._statistics) :], strict=True):
            parameter.grad = self._strategy.as_gradient(gradient, parameter)
        return loss_sum[0]

    def _add_own(
        self,
        batch: Batch,
        one_pass: Callable[..., torch.Tensor],
        begin_sum: Callable[[Mapping[Node, torch.Tensor]], None],
    ) -> None:
        """Add up the vectors of this rank's slices, as far as the tree goes, and begin the sum over all ranks of each.

        In a step that is audited the sums begin when that is over.
        """
        sums: list[TreeSum[torch.Tensor]] = [TreeSum(self._sum.num_slices) for _ in self._buckets]
        digests: dict[int, list[int]] = defaultdict(list)
        last = _in_order(batch.slices)[-1].number

        def give(number: int, bucket: int, vector: torch.Tensor) -> None:
            if batch.read_slice_of:
                digests[number].append(int(tensor_digest(vector)))  # before another one is added to it
            sums[bucket].add((number, number + 1), vector)
            if number == last and not batch.read_slice_of:
                begin_sum(sums[bucket].partial)

        self._slices(batch, one_pass, give)
        if batch.read_slice_of:

            def compute(other: Batch) -> dict[int, int]:
                found: dict[int, list[int]] = defaultdict(list)
                self._slices(
                    other, one_pass, lambda number, _, vector: found[number].append(int(tensor_digest(vector)))
                )
                return _of_slices(found)

            audit(batch, _of_slices(digests), compute, self._collectives, self._sum.num_slices)
            for one in sums:
                begin_sum(one.partial)

    def _slices(self, batch: Batch, one_pass: Callable[..., torch.Tensor], give: Give) -> None:
        """Give each slice of a batch, bucket by bucket."""
        before = [statistics.clone() for statistics in self._statistics]
        weights = _trainable(self._network)
        for one in _in_order(batch.slices):
            number_of_pass = partial(one_pass, number=one.number)
            self._buckets_of(batch.part(one), weights, number_of_pass, partial(give, one.number))
            for statistics, value in zip(self._statistics, before, strict=True):
                statistics.copy_(value)

    def _buckets_of(
        self,
        part: Batch,
        weights: Sequence[torch.nn.Parameter],
        one_pass: Callable[[Batch], torch.Tensor],
        give: Callable[[int, torch.Tensor], None],
    ) -> None:
        """Give each bucket of a slice when its backward pass has the gradients in it and in those before; the last one
        when it has ended."""
        if not part.num_samples:
            for number, bucket in enumerate(self._buckets):
                give(number, weights[0].new_zeros(self._sum.num_parts * bucket.part_size))
            return
        groups = [weights[bucket.parameters] for bucket in self._buckets]
        missing = [set(group) for group in groups]
        num_given = 0

        def see(number: int, weight: torch.Tensor) -> None:
            nonlocal num_given
            if number < num_given:
                raise UserError(
                    "expected one gradient a pass of each weight for --slices on several ranks, received another one "
                    "when the first was on its way; call torch.utils.checkpoint with use_reentrant=False, or raise "
                    "--bucket-size"
                )
            missing[number].discard(weight)
            while not missing[num_given]:
                give(num_given, self._vector(groups[num_given], self._buckets[num_given]))
                num_given += 1

        with ExitStack() as hooks:
            for number, group in enumerate(groups[:-1]):
                for weight in group:
                    hooks.enter_context(weight.register_post_accumulate_grad_hook(partial(see, number)))
            loss_sum = one_pass(part)
        for number in range(num_given, len(groups)):
            first = [loss_sum, *self._statistics] if number == len(groups) - 1 else []
            give(number, self._vector(groups[number], self._buckets[number], first))

    def _vector(
        self, weights: Sequence[torch.nn.Parameter], bucket: _Bucket, first: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        """What a slice has in a bucket; its gradients are taken out of the weights."""
        # A slice may leave a part of a network unused.
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in weights]
        for weight in weights:
            weight.grad = None
        if self.trace:
            self.trace.see_slice(weights, gradients)
        num_parts = self._sum.num_parts
        shards = [torch.atleast_1d(one).chunk(num_parts) for one in gradients]
        parts = [[*first, *(own[rank] for own in shards if rank < len(own))] for rank in range(num_parts)]
        return torch.cat([piece for tensors in parts for piece in _pieces(tensors, bucket.part_size)])


def _pieces(tensors: Iterable[torch.Tensor], part_size: int) -> Iterator[torch.Tensor]:
    """A part of a vector, in pieces of one axis: the tensors, each with what it lacks to a multiple."""
    size = 0
    for tensor in tensors:
        yield tensor.reshape(-1)
        if padding := -tensor.numel() % _ALIGNMENT:
            yield tensor.new_zeros(padding)
        size += _aligned(tensor.numel())
    yield tensor.new_zeros(part_size - size)


def _cut(num_bytes: Sequence[int], megabytes: Sequence[float]) -> Iterator[slice]:
    """The parameters of each bucket, the last ones first, as a backward pass comes to them.

    Args:
        num_bytes: of each parameter.
        megabytes: with how many a bucket is full: the first, ..., and all others.
    """
    limits = itertools.chain(megabytes, itertools.repeat(megabytes[-1]))
    end, limit, size = len(num_bytes), next(limits) * 2**20, 0
    for begin in reversed(range(len(num_bytes))):
        size += num_bytes[begin]
        if size >= limit or begin == 0:
            yield slice(begin, end)
            end, limit, size = begin, next(limits) * 2**20, 0


def _in_order(slices: Sequence[Slice]) -> list[Slice]:
    """Those without samples first: the sums begin beside the backward pass of the last one."""
    return sorted(slices, key=lambda one: one.end > one.begin)


def _trainable(network: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in network.parameters() if parameter.requires_grad]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _split(vector: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """The tensors of a part of a vector."""
    ends = itertools.accumulate(map(_aligned, sizes), initial=0)
    return [vector[begin : begin + size] for begin, size in zip(ends, sizes, strict=False)]


def _of_slices(digests: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """The digest of each slice from those of its buckets."""
    return {number: digest(np.array(found)) for number, found in digests.items()}
