"""Sums over Horovod's ranks that travel as bfloat16, which its own messages do not have (0.28.1)."""

from __future__ import annotations

from typing import cast

import horovod.torch as hvd
import torch

from allstep.common.config.train_config import StrategyConfig
from allstep.pytorch.strategies.missing_gradients import ask_for_missing
from allstep.pytorch.strategies.reduction import Reduction, trainable


def bf16_sum(vector: torch.Tensor, divisor: float) -> torch.Tensor:
    """Return the float32 sum of the ranks' vectors (n,), divided by `divisor`; all ranks call it.

    Each rank adds up a part of the vectors in float32, so that a sum is rounded once, and not at each rank as in a ring
    of bfloat16. As many bytes travel as in an all-reduce of 16 bits.
    """
    size, world_size = len(vector), hvd.size()
    padded = torch.nn.functional.pad(vector.bfloat16(), (0, -size % world_size))
    handle = hvd.alltoall_async(padded.view(torch.uint8), name="allstep.bf16_parts")
    parts = cast("tuple[torch.Tensor, torch.Tensor]", hvd.synchronize(handle))[0]
    own = parts.view(torch.bfloat16).view(world_size, -1).float().sum(0) / divisor
    whole = hvd.allgather(own.bfloat16().view(torch.uint8), name="allstep.bf16_sums")
    return whole.view(torch.bfloat16)[:size].float()


class Bf16Sums(Reduction):
    """--compression bf16: all gradients together, after the backward pass."""

    def __init__(self, network: torch.nn.Module, optimizer: torch.optim.Optimizer, flags: StrategyConfig) -> None:
        super().__init__(network, optimizer)
        self._divides = flags.op == "average"

    def wait(self, loss_sum: torch.Tensor) -> torch.Tensor:
        weights = trainable(self.model)
        missing_on_all = ask_for_missing(weights)
        gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
        dense = [one.to_dense() if one.is_sparse else one for one in gradients]
        summed = bf16_sum(torch.cat([one.flatten() for one in dense]), hvd.size() if self._divides else 1.0)
        for weight, part in zip(weights, summed.split([weight.numel() for weight in weights]), strict=True):
            weight.grad = part.view_as(weight)
        for weight in missing_on_all():
            weight.grad = None
        return loss_sum

    def pending_tensors(self) -> tuple[str, ...]:
        return ("the sum of all gradients in bfloat16",)
