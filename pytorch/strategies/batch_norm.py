"""Batch norm over the global batch. PyTorch's and Horovod's own do it on GPUs alone; this one does it on any device.

And for either kind of batch norm: samples that only fill an empty slice up leave its statistics alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from allstep.pytorch.compat import BatchNorm, share_tensors

Reduce = Callable[[torch.Tensor, str], torch.Tensor]
"""Sums a tensor over all ranks, in place; the name is the same on all of them and no other sum's."""


def synchronise_batch_norm(network: torch.nn.Module, reduce: Reduce, prefix: str = "") -> None:
    """Replace each batch norm in `network`; the new ones have the same parameters by the same names."""
    for name, child in network.named_children():
        if isinstance(child, BatchNorm):
            setattr(network, name, GlobalBatchNorm(child, reduce, prefix + name))
        else:
            synchronise_batch_norm(child, reduce, f"{prefix}{name}.")


@contextlib.contextmanager
def uncounted(network: torch.nn.Module) -> Iterator[None]:
    """Within it, samples pass through the batch norms of `network` in training without changing their statistics."""
    norms = [module for module in network.modules() if isinstance(module, BatchNorm)]
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
            norm.train(counts)


class GlobalBatchNorm(BatchNorm):
    """Batch norm whose mean and variance are those of the samples of all ranks, however many each has."""

    def __init__(self, local: BatchNorm, reduce: Reduce, name: str) -> None:
        super().__init__(local.num_features, local.eps, local.momentum, local.affine, local.track_running_stats)
        share_tensors(self, local)
        self._reduce, self._name = reduce, name
        self.counts = 1.0

    def _check_input_dim(self, values: torch.Tensor) -> None:
        """The batch norm that this one replaces knew its dimensions; here any do."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Normalise `values`, (samples, channels, ...), over all axes but the channels'."""
        if not self.training:
            return super().forward(values)
        dtype = values.dtype  # bfloat16 under autocast, in which a count would lose digits
        values = values.to(torch.promote_types(dtype, torch.float32))
        axes = [axis for axis in range(values.dim()) if axis != 1]
        shape = [1, -1] + [1] * (values.dim() - 2)
        local_count = values.new_full(
            (1,), values.numel() / values.shape[1]
        )  # made on the device: no step waits for it
        # The mean first, the variance around it then: the sum of squares alone would lose digits.
        sums = self._sum(self.counts * torch.cat([values.sum(axes), local_count]), "mean")
        count = sums[-1].clamp(min=1)
        # Where the samples of no rank count, the statistics of before keep the values in range.
        assert self.running_mean is not None and self.running_var is not None
        is_empty = sums[-1] == 0
        mean = torch.where(is_empty, self.running_mean, sums[:-1] / count)
        centred = values - mean.view(shape)
        variance = self._sum(self.counts * centred.square().sum(axes), "variance") / count
        self._track(mean, variance * count / (count - 1).clamp(min=1), sums[-1])
        variance = torch.where(is_empty, self.running_var, variance)
        normalised = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:  # times 1 for the reason that resnet.BatchNorm gives
            normalised = normalised * self.weight.view(shape) + 1 * self.bias.view(shape)
        return normalised.to(dtype)

    def _sum(self, values: torch.Tensor, what: str) -> torch.Tensor:
        return _SumOverRanks.apply(values, self._reduce, f"batch_norm.{self._name}.{what}")

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        if self.track_running_stats:
            assert self.running_mean is not None and self.running_var is not None
            momentum = self.momentum
            if self.num_batches_tracked is not None:
                self.num_batches_tracked += 1
                if momentum is None:  # the mean over all batches
                    momentum = 1 / self.num_batches_tracked
            assert momentum is not None
            momentum = momentum * count.clamp(max=1)  # 0 where no samples count
            self.running_mean.lerp_(mean, momentum)
            self.running_var.lerp_(variance, momentum)


class _SumOverRanks(torch.autograd.Function):
    """y = sum of x over ranks, on all ranks; so the gradient of x is the sum over ranks of the gradients of y."""

    @staticmethod
    def forward(ctx, values: torch.Tensor, reduce: Reduce, name: str) -> torch.Tensor:
        ctx.reduce, ctx.name = reduce, name
        return reduce(values.clone(), name)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.reduce(gradient.clone(), f"{ctx.name}.gradient"), None, None
