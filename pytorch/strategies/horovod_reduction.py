"""Horovod's reductions of gradients: by all-reduce during the backward pass, in bfloat16 after it, or by Adasum."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import horovod.torch as hvd
import torch

from allstep.common.config.train_config import StrategyConfig
from allstep.pytorch.compat import all_reduce_handles
from allstep.pytorch.kept.network_state import as_real, can_train
from allstep.pytorch.passes import ReducedPass, TrainPass
from allstep.pytorch.strategies.reduction import (
    BUCKET,
    FIRST_BUCKET,
    Reduction,
    aligned,
    all_trainable,
    cut,
    pieces,
    trainable,
    unpack,
)


@dataclass(eq=False)
class _Bucket:
    """Gradients of one type that travel as one vector."""

    number: int
    parameters: Sequence[torch.nn.Parameter]
    sizes: Sequence[int]
    """Elements of each gradient."""
    awaited: set[torch.nn.Parameter] = field(default_factory=set)
    """Parameters whose gradients backward has still to compute."""
    sparse_dims: Sequence[int] = ()
    """Numbers of sparse dimensions of this rank's gradients, 0 for dense ones; known once the sum has begun."""
    handle: int | None = None
    """Horovod's handle of the sum."""
    wait: Callable[[], torch.Tensor] | None = None
    """Waits for the sum of the ranks' vectors; None before it has begun."""


class Sums(Reduction):
    """Averages, or sums, of the ranks' gradients, for any optimizer.

    Gradients are cut into buckets, in the order in which a backward pass computes them, as in DDP (Li et al. 2020,
    "PyTorch Distributed", section 3.2.3). The sum of a bucket begins when backward has computed its last gradient.
    Horovod's own optimizer sends each gradient separately, which costs the host a call for each. A large gradient is a
    bucket of its own, which saves copying it.
    """

    bucket_megabytes: Sequence[float] = (FIRST_BUCKET, BUCKET)
    """Size of the first bucket of small gradients, and of the others."""
    large_megabytes = 1.0
    """Size from which a gradient has a bucket of its own."""

    def __init__(self, network: torch.nn.Module, optimizer: torch.optim.Optimizer, flags: StrategyConfig) -> None:
        super().__init__(network, optimizer)
        self._averages, self._compression = flags.op == "average", flags.compression
        self._names = {parameter: name for name, parameter in network.named_parameters()}
        self._buckets: list[_Bucket] = []
        self._bucket_of: Mapping[torch.nn.Parameter, _Bucket] = {}
        self._is_last_pass = False
        parameters = [parameter for parameter in self._names if can_train(parameter)]
        with all_trainable(parameters):  # so that frozen ones get hooks
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self._see)

    def train_pass(self, one_pass: TrainPass) -> ReducedPass:
        def reduced(inputs: torch.Tensor, targets: torch.Tensor, loss_weight: float, *, is_last: bool) -> torch.Tensor:
            if is_last:
                self._begin()
            return one_pass(inputs, targets, loss_weight)

        return reduced

    def wait(self, loss_sum: torch.Tensor) -> torch.Tensor:
        self._is_last_pass = False
        # This starts now, so that it overlaps with the sums.
        missing_on_all = _ask_for_missing(self._bucket_of)
        for bucket in self._buckets:
            if bucket.wait is None:  # this rank lacks some of its gradients
                self._begin_sum(bucket)
        for bucket in self._buckets:
            assert bucket.wait is not None
            gradients = unpack(bucket.wait(), bucket.sizes)
            for parameter, gradient, dim in zip(bucket.parameters, gradients, bucket.sparse_dims, strict=True):
                parameter.grad = _as_gradient(parameter, gradient, dim)
            bucket.handle = bucket.wait = None
        for parameter in missing_on_all():
            parameter.grad = None
        return loss_sum

    def pending_tensors(self) -> Sequence[str]:
        under_way = [bucket for bucket in self._buckets if bucket.handle is not None and _is_under_way(bucket.handle)]
        return [self._names[parameter] for bucket in under_way for parameter in bucket.parameters]

    def _begin(self) -> None:
        """Begin the last backward pass of a step."""
        now = [parameter for parameter in trainable(self.model) if can_train(parameter)]
        if list(map(id, now)) != list(map(id, self._bucket_of)):  # a user may freeze weights and train them again
            self._buckets = [
                _Bucket(number, bucket, [as_real(one).numel() for one in bucket])
                for number, bucket in enumerate(self._cut(now))
            ]
            bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
            self._bucket_of = {parameter: bucket_of[parameter] for parameter in now}
        for bucket in self._buckets:
            bucket.awaited = set(bucket.parameters)
        self._is_last_pass = True

    def _cut(self, parameters: Sequence[torch.nn.Parameter]) -> Iterator[Sequence[torch.nn.Parameter]]:
        """Yield the parameters of each bucket."""
        sizes = {parameter: parameter.numel() * parameter.element_size() for parameter in parameters}
        large = [parameter for parameter, size in sizes.items() if size >= self.large_megabytes * 2**20]
        yield from ([parameter] for parameter in large)
        for kind in {parameter.dtype: None for parameter in parameters}:
            small = [one for one in parameters if one.dtype is kind and sizes[one] < self.large_megabytes * 2**20]
            yield from (small[part] for part in cut([sizes[one] for one in small], self.bucket_megabytes))

    def _see(self, parameter: torch.nn.Parameter) -> None:
        """See a gradient that backward has just added up in `parameter`."""
        bucket = self._bucket_of.get(parameter)
        if not self._is_last_pass or bucket is None:
            return
        if bucket.wait is not None:
            raise RuntimeError(
                f"backward computed the gradient of {self._names[parameter]} again after it was sent; use "
                "torch.utils.checkpoint with use_reentrant=False"
            )
        bucket.awaited.discard(parameter)
        if not bucket.awaited:
            self._begin_sum(bucket)

    @torch.no_grad()
    def _begin_sum(self, bucket: _Bucket) -> None:
        """Begin the sum of a bucket over all ranks; zeros stand for gradients that this rank lacks."""
        found = [parameter.grad for parameter in bucket.parameters]
        bucket.sparse_dims = [0 if one is None or not one.is_sparse else one.sparse_dim() for one in found]
        dense = [
            as_real(torch.zeros_like(parameter) if one is None else one.to_dense() if one.is_sparse else one)
            for parameter, one in zip(bucket.parameters, found, strict=True)
        ]
        is_whole = len(dense) == 1 and dense[0].is_contiguous()
        vector = dense[0].view(-1) if is_whole else torch.cat([*pieces(dense, sum(map(aligned, bucket.sizes)))])
        bucket.wait = self._sum(vector, bucket)

    def _sum(self, vector: torch.Tensor, bucket: _Bucket) -> Callable[[], torch.Tensor]:
        """Begin the sum of the ranks' vectors, and return a function that waits for it."""
        compression = cast("Any", getattr(hvd.Compression, self._compression))
        sent, context = compression.compress(vector)
        op = hvd.Average if self._averages else hvd.Sum
        bucket.handle = handle = hvd.allreduce_async_(sent, op=op, name=f"gradients.{bucket.number}")
        return lambda: compression.decompress(hvd.synchronize(handle), context)


def _ask_for_missing(parameters: Iterable[torch.nn.Parameter]) -> Callable[[], list[torch.nn.Parameter]]:
    """Begin to compare which gradients exist; all ranks call it, and then the function that it returns.

    Returns: a function that waits, and returns the parameters without a gradient on any rank.
    """
    parameters = list(parameters)
    counts = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
    handle = hvd.allreduce_async_(counts, op=hvd.Sum, name="allstep.have_gradients")

    def missing() -> list[torch.nn.Parameter]:
        hvd.synchronize(handle)
        return [parameter for parameter, count in zip(parameters, counts.tolist(), strict=True) if not count]

    return missing


def _as_gradient(parameter: torch.nn.Parameter, own: torch.Tensor, sparse_dim: int) -> torch.Tensor:
    """Return `own`, a part of a bucket's sum, in the form of a gradient of its parameter."""
    gradient = own.view(as_real(parameter).shape)
    if parameter.is_complex():
        gradient = torch.view_as_complex(gradient)
    if sparse_dim:
        return gradient.to_sparse(sparse_dim)
    # Optimizers need gradients with the memory layout of their weights.
    return gradient if gradient.stride() == parameter.stride() else torch.empty_like(parameter).copy_(gradient)


def _is_under_way(handle: int) -> bool:
    try:
        return not hvd.poll(handle)
    except ValueError:  # it has been waited for, and Horovod has forgotten it
        return False


class Bf16Sums(Sums):
    """--compression bf16: all gradients together, after the backward pass."""

    bucket_megabytes, large_megabytes = (math.inf,), math.inf

    def pending_tensors(self) -> tuple[str, ...]:
        return ("the sum of all gradients in bfloat16",)

    def _sum(self, vector: torch.Tensor, bucket: _Bucket) -> Callable[[], torch.Tensor]:
        return lambda: bf16_sum(vector, hvd.size() if self._averages else 1.0).to(vector.dtype)


def bf16_sum(vector: torch.Tensor, divisor: float) -> torch.Tensor:
    """Return the float32 sum of the ranks' vectors (n,), divided by `divisor`; all ranks call it.

    The vectors are sent as bfloat16, which Horovod 0.28.1 lacks. Each rank adds up a part of them in float32, so a sum
    is rounded once, not at each rank as in a ring of bfloat16. As many bytes are sent as in an all-reduce of 16 bits.
    """
    size, world_size = len(vector), hvd.size()
    padded = torch.nn.functional.pad(vector.bfloat16(), (0, -size % world_size))
    handle = hvd.alltoall_async(padded.view(torch.uint8), name="allstep.bf16_parts")
    parts = cast("tuple[torch.Tensor, torch.Tensor]", hvd.synchronize(handle))[0]
    own = parts.view(torch.bfloat16).view(world_size, -1).float().sum(0) / divisor
    whole = hvd.allgather(own.bfloat16().view(torch.uint8), name="allstep.bf16_sums")
    return whole.view(torch.bfloat16)[:size].float()


class AdasumOfUpdates(Reduction):
    """Adasum, which combines the updates of the ranks' optimizers: Horovod steps the optimizer."""

    def __init__(self, network: torch.nn.Module, optimizer: torch.optim.Optimizer, flags: StrategyConfig) -> None:
        distributed = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=network.named_parameters(),
            compression=cast("Any", Sendable(getattr(hvd.Compression, flags.compression))),
            op=hvd.Adasum,
            backward_passes_per_step=flags.accumulate_steps,
            sparse_as_dense=True,
        )
        super().__init__(network, distributed)

    def pending_tensors(self) -> Sequence[str]:
        return [name for name, handle in all_reduce_handles(self.optimizer).items() if _is_under_way(handle)]


@dataclass(frozen=True)
class Sendable:
    """Wrapper of one of Horovod's compressions that also takes complex gradients, and any layout in memory."""

    compression: Any

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, torch.Tensor]]:
        """Return the tensor to send, and the context for `decompress`."""
        sent, context = self.compression.compress(as_real(tensor).contiguous())
        return sent, (context, tensor)

    def decompress(self, tensor: torch.Tensor, context: tuple[Any, torch.Tensor]) -> torch.Tensor:
        """Return a received tensor in the form of the original gradient."""
        context, like = context
        tensor = self.compression.decompress(tensor, context)
        if like.is_complex():
            tensor = torch.view_as_complex(tensor)
        # Optimizers need gradients with the memory layout of their weights.
        return tensor if tensor.stride() == like.stride() else torch.empty_like(like).copy_(tensor)
