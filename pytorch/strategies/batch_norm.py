"""Batch norm over the global batch on any device; those of PyTorch and Horovod need GPUs.

For all kinds of batch norm: samples that only pad an empty slice do not change the statistics.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from allstep.common.base.errors import UserError
from allstep.pytorch.compat import BatchNorm
from allstep.pytorch.networks.batch_norm import BatchNorm as OneValueBatchNorm

Reduce = Callable[[torch.Tensor, str], torch.Tensor]
"""Sums a tensor over all ranks, in place; the name is the same on all of them and no other sum's."""


def synchronise_batch_norm(network: torch.nn.Module, reduce: Reduce, *, wanted: bool) -> None:
    """Make batch norms of `network` normalise over all ranks, by changing their classes.

    These are all of them if `wanted`, else only torch's SyncBatchNorm in a user's network. Raises UserError if a
    subclass of batch norm has its own forward.
    """
    for name, module in network.named_modules():
        if isinstance(module, BatchNorm) and (wanted or isinstance(module, torch.nn.SyncBatchNorm)):
            if not isinstance(module, GlobalBatchNorm):
                module.__class__ = _global_kind(type(module), name)  # pyright: ignore[reportAttributeAccessIssue]
            assert isinstance(module, GlobalBatchNorm)
            module.reduce, module.name, module.counts = reduce, name, 1.0


def brought_sync_batch_norm(network: torch.nn.Module) -> str | None:
    """Return the name of the first SyncBatchNorm of `network`, if it has one."""
    return next((name for name, one in network.named_modules() if isinstance(one, torch.nn.SyncBatchNorm)), None)


def _global_kind(kind: type[BatchNorm], name: str) -> type[GlobalBatchNorm]:
    """Return the class that computes over all ranks what `kind` computes over one."""
    if kind is torch.nn.SyncBatchNorm:
        return GlobalBatchNorm
    if kind.__call__ is not torch.nn.Module.__call__:
        raise _unknown(kind, name)
    forward = kind.forward
    if forward in (BatchNorm.forward, OneValueBatchNorm.forward):
        base = GlobalBatchNorm
    elif kind.__module__.partition(".")[0] == "timm" and forward.__qualname__ == "BatchNormAct2d.forward":
        base = _GlobalBatchNormAct
    else:
        raise _unknown(kind, name)
    return cast("type[GlobalBatchNorm]", type(kind.__name__, (base, kind), {}))


def _unknown(kind: type, name: str) -> UserError:
    return UserError(
        f"expected batch norms of PyTorch or timm with --sync-batch-norm, received {name or 'the network'} of class "
        f"{kind.__name__}, which has a forward of its own; leave --sync-batch-norm out, or use nn.BatchNorm2d and a "
        "layer after it"
    )


@contextlib.contextmanager
def uncounted(network: torch.nn.Module) -> Iterator[None]:
    """Keep the statistics of batch norms unchanged by the samples that pass through `network` in the block."""
    norms = [module for module in network.modules() if isinstance(module, BatchNorm) and module.training]
    _let_count(norms, False)
    try:
        yield
    finally:
        _let_count(norms, True)


def _let_count(norms: list[BatchNorm], counts: bool) -> None:
    for norm in norms:
        if isinstance(norm, GlobalBatchNorm):
            norm.counts = float(counts)  # it takes part in the sums over ranks in either case
        else:
            norm.training = counts  # of the norm alone: what it contains goes on as it is
            if counts and norm.num_batches_tracked is not None:
                norm.num_batches_tracked += 1  # as on the ranks with samples


class GlobalBatchNorm(BatchNorm):
    """Batch norm whose mean and variance are those of the samples of all ranks, however many each has."""

    reduce: Reduce
    name: str
    counts: float
    """1.0, or 0.0 for samples that leave the statistics alone."""

    def _check_input_dim(self, values: torch.Tensor) -> None:
        """Take any number of dimensions, as torch's SyncBatchNorm does."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Normalise `values`, (samples, channels, ...), over all axes but the channels'."""
        if not self.training:
            return BatchNorm.forward(self, values)
        dtype = values.dtype  # bfloat16 under autocast, in which a count would lose digits
        values = values.to(torch.promote_types(dtype, torch.float32))
        axes = [axis for axis in range(values.dim()) if axis != 1]
        shape = [1, -1] + [1] * (values.dim() - 2)
        # Made on the device, so that no step waits for it.
        local_count = values.new_full((1,), values.numel() / values.shape[1])
        # First the mean, then the variance around it: the sum of squares alone would lose digits.
        sums = self._sum(self.counts * torch.cat([values.sum(axes), local_count]), "mean")
        count = sums[-1].clamp(min=1)
        # If no rank has samples that count, the running statistics keep the values in range.
        is_empty = sums[-1] == 0
        before = torch.zeros_like(sums[:-1]) if self.running_mean is None else self.running_mean
        mean = torch.where(is_empty, before, sums[:-1] / count)
        centred = values - mean.view(shape)
        variance = self._sum(self.counts * centred.square().sum(axes), "variance") / count
        self._track(mean, variance * count / (count - 1).clamp(min=1), sums[-1])
        before = torch.ones_like(variance) if self.running_var is None else self.running_var
        variance = torch.where(is_empty, before, variance)
        normalised = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            normalised = normalised * self.weight.view(shape)
        if self.bias is not None:  # times 1 for the reason that networks.batch_norm gives
            normalised = normalised + 1 * self.bias.view(shape)
        return normalised.to(dtype)

    def _sum(self, values: torch.Tensor, what: str) -> torch.Tensor:
        return _SumOverRanks.apply(values, self.reduce, f"batch_norm.{self.name}.{what}")

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            momentum = self.momentum
            if self.num_batches_tracked is not None:
                self.num_batches_tracked += 1
                if momentum is None:  # the mean over all batches
                    momentum = 1 / self.num_batches_tracked
            assert momentum is not None
            momentum = momentum * count.clamp(max=1)  # 0 where no samples count
            self.running_mean.lerp_(mean, momentum)
            self.running_var.lerp_(variance, momentum)


class _GlobalBatchNormAct(GlobalBatchNorm):
    """Batch norm of timm (1.0), which drops activations out and applies an activation function after it."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Normalise `values`, and apply what follows."""
        return cast("Any", self).act(cast("Any", self).drop(super().forward(values)))


class _SumOverRanks(torch.autograd.Function):
    """y = sum of x over ranks, on all ranks; so the gradient of x is the sum over ranks of the gradients of y."""

    @staticmethod
    def forward(ctx, values: torch.Tensor, reduce: Reduce, name: str) -> torch.Tensor:
        ctx.reduce, ctx.name = reduce, name
        return reduce(values.clone(), name)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.reduce(gradient.clone(), f"{ctx.name}.gradient"), None, None
