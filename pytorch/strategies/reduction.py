"""Reductions of the gradients of all ranks: by a strategy's library, or with --slices in one fixed order."""

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from allstep.common.base.errors import UserError
from allstep.common.cli.strategy_flags import SUM_OF_SLICES
from allstep.common.data.slices import Node
from allstep.pytorch.compat import BatchNorm
from allstep.pytorch.optimizers import with_whole_norms, without_fused_kernels
from allstep.pytorch.optimizers.layers import local
from allstep.pytorch.passes import ReducedPass, TrainPass
from allstep.pytorch.strategies.ordered_sum import OrderedSum, SumsUnderWay

_ALIGNMENT = 16
"""Number of elements at whose multiples tensors begin in a vector: on a GPU, norms depend on the alignment."""
FIRST_BUCKET, BUCKET = 1.0, 25.0
"""Megabytes, as in DDP. The first bucket is small so that its sum begins soon."""


class Reduction:
    """The gradients of one rank, which need no reduction; strategies derive their own from it."""

    is_ordered = False
    """Whether slices are added up in one order, so that no bit may depend on how weights are cut into shards."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, eval_model: torch.nn.Module | None = None
    ) -> None:
        """`model` runs in training passes, `eval_model`, by default the same, in validation."""
        self.model, self.optimizer = model, optimizer
        self.eval_model = model if eval_model is None else eval_model

    def train_pass(self, one_pass: TrainPass) -> ReducedPass:
        """Return `one_pass` with its gradients combined with those of the other ranks in the last pass of a step."""
        return lambda inputs, targets, loss_weight, *, is_last: one_pass(inputs, targets, loss_weight)

    def wait(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """Wait until the parameters have the averaged gradients.

        A parameter without a gradient on all ranks has none; one that has a gradient on some ranks has the average
        with zeros for the others.

        Returns: what this rank reports as its sum of losses, given that of its backward passes.
        """
        return loss_sum

    def whole_weights(self) -> contextlib.AbstractContextManager:
        """Return a context in which every rank has whole weights, however often it runs the network; collective."""
        return contextlib.nullcontext()

    def pending_tensors(self) -> Sequence[str]:
        """See `common.training.worker.Worker`."""
        return ()


@dataclass(frozen=True)
class Bucket:
    """Parameters that follow one another, whose gradients travel together."""

    parameters: slice
    part_size: int
    """Elements of a part of its vector, with padding."""
    sizes: list[int]
    """Elements of each of this rank's tensors in it."""


class Ordered(Reduction):
    """--slices: the gradients of all slices, added up in one fixed order.

    The gradients are cut into buckets, as those of DDP are, in the order in which a backward pass has them. The sum of
    a bucket over all ranks begins when the last slice of this rank has its gradients in it, during the rest of the
    backward pass. A sum goes element by element, so its bits do not depend on the buckets.

    A bucket's vector consists of a slice's gradients. In the last bucket, these follow the slice's sum of losses, for
    each parameter whether it has a gradient, and the running statistics of batch norms. The mean of the statistics over
    all slices becomes the next ones. Where ranks keep shards of the weights, a vector has a part for each rank: the
    same, but of that rank's shards.
    """

    is_ordered = True

    def __init__(
        self,
        network: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        ordered_sum: OrderedSum,
        megabytes: Sequence[float],
    ) -> None:
        """`megabytes` are the sizes of the first buckets; the last number is also that of all others.

        Raises UserError if a weight is complex.
        """
        super().__init__(network, optimizer)
        if name := next((name for name, one in network.named_parameters() if one.is_complex()), None):
            raise UserError(
                f"expected real weights for --slices, received {name}, which is complex; leave --slices out"
            )
        # No bit may depend on how weights are cut into shards. Fused CPU kernels round the last elements of a tensor
        # differently.
        without_fused_kernels(optimizer)
        with_whole_norms(optimizer)
        self.sum, self._megabytes = ordered_sum, megabytes
        norms = [module for module in network.modules() if isinstance(module, BatchNorm)]
        self.statistics = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
        self._all, self._parameters = list(network.parameters()), list[torch.nn.Parameter]()

    def begin(self, num_with_samples: int) -> None:
        """Begin a step in which so many slices have samples."""
        now = [parameter for parameter in self._all if parameter.requires_grad]
        if list(map(id, now)) != list(map(id, self._parameters)):  # a user may freeze weights and train them again
            self._parameters = now
            num_bytes = [parameter.numel() * parameter.element_size() for parameter in now]
            self.buckets = [self._bucket(parameters) for parameters in cut(num_bytes, self._megabytes)]
        self._num_with_samples = num_with_samples
        self._sums, self._saw_all = SumsUnderWay(self.sum), False

    def begin_sum(self, partial: Mapping[Node, torch.Tensor]) -> None:
        """Begin the sum of the next bucket over all ranks, given this rank's `TreeSum.partial`."""
        self._sums.begin(partial)

    def vector(self, bucket: Bucket, gradients: Sequence[torch.Tensor], first: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a slice's vector of a bucket, from whole gradients and what comes before them."""
        num_parts = self.sum.num_parts
        shards = [torch.atleast_1d(one).chunk(num_parts) for one in gradients]
        parts = [[*first, *(own[rank] for own in shards if rank < len(own))] for rank in range(num_parts)]
        return torch.cat([piece for tensors in parts for piece in pieces(tensors, bucket.part_size)])

    def first(self, loss_sum: torch.Tensor, have_gradients: Sequence[bool]) -> list[torch.Tensor]:
        """Return what comes before the gradients in the last bucket of a slice."""
        self._saw_all |= all(have_gradients)
        return [loss_sum, loss_sum.new_tensor(have_gradients), *self.statistics]

    def wait(self, loss_sum: torch.Tensor) -> torch.Tensor:
        split = [unpack(total, bucket.sizes) for total, bucket in zip(self._sums.totals(), self.buckets, strict=True)]
        loss_sum, have_gradients, *tensors = itertools.chain(*reversed(split))
        for statistics, value in zip(self.statistics, tensors, strict=False):
            statistics.copy_(value.view_as(statistics) / self._num_with_samples)
        # Reading numbers waits for a GPU, which is needless if one slice of this rank had all gradients.
        found = [True] * len(self._parameters) if self._saw_all else (have_gradients > 0).tolist()
        gradients = tensors[len(self.statistics) :]
        for parameter, gradient, is_there in zip(self._parameters, gradients, found, strict=True):
            parameter.grad = self.as_gradient(gradient, parameter) if is_there else None
        # All ranks have the same sum, so only rank 0 reports it.
        return loss_sum[0] if self.sum.rank == 0 else torch.zeros(())

    def as_gradient(self, own: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return `own`, this rank's share of a gradient as a vector, as the gradient of `parameter`."""
        return own.view_as(parameter)

    def pending_tensors(self) -> Sequence[str]:
        return (SUM_OF_SLICES,) if self.sum.world_size > 1 else ()

    def _bucket(self, parameters: slice) -> Bucket:
        own, num_parts = self._parameters[parameters], self.sum.num_parts
        first = []
        if parameters.start == 0:
            first = [1, len(self._parameters), *(tensor.numel() for tensor in self.statistics)]
        # The first ranks have as many rows of a weight, the last ones fewer or none.
        shapes = [tuple(parameter.shape) or (1,) for parameter in own]
        largest = [-(-rows // num_parts) * math.prod(row) for rows, *row in shapes]
        part_size = sum(map(aligned, (*first, *largest)))
        sizes = [*first, *(tensor.numel() for tensor in local(own))]
        return Bucket(parameters, part_size + self.sum.padding(part_size), sizes)


@contextlib.contextmanager
def all_trainable(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Let a library prepare for frozen parameters as well, which a user may train later."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def trainable(network: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters of `network` that are not frozen."""
    return [parameter for parameter in network.parameters() if parameter.requires_grad]


def pieces(tensors: Iterable[torch.Tensor], part_size: int) -> Iterator[torch.Tensor]:
    """Yield a part of a vector in pieces of one axis: the tensors, each padded to a multiple of the alignment."""
    size = 0
    for tensor in tensors:
        yield tensor.reshape(-1)
        if padding := -tensor.numel() % _ALIGNMENT:
            yield tensor.new_zeros(padding)
        size += aligned(tensor.numel())
    yield tensor.new_zeros(part_size - size)


def cut(num_bytes: Sequence[int], megabytes: Sequence[float]) -> Iterator[slice]:
    """Yield the parameters of each bucket, the last ones first, as a backward pass comes to them.

    `num_bytes` has the size of each parameter; `megabytes` is that of `Ordered`.
    """
    limits = itertools.chain(megabytes, itertools.repeat(megabytes[-1]))
    end, limit, size = len(num_bytes), next(limits) * 2**20, 0
    for begin in reversed(range(len(num_bytes))):
        size += num_bytes[begin]
        if size >= limit or begin == 0:
            yield slice(begin, end)
            end, limit, size = begin, next(limits) * 2**20, 0


def aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def unpack(vector: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return the tensors of a part of a vector."""
    ends = itertools.accumulate(map(aligned, sizes), initial=0)
    return [vector[begin : begin + size] for begin, size in zip(ends, sizes, strict=False)]
