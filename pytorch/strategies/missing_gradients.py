"""Find the parameters that have a gradient on no rank of Horovod, which the optimizer leaves alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import horovod.torch as hvd
import torch


def ask_for_missing(parameters: Sequence[torch.nn.Parameter]) -> Callable[[], list[torch.nn.Parameter]]:
    """Begin to compare which gradients are there; all ranks call it, and then what it returns.

    Returns: a function that waits, and returns the parameters that have no gradient on all ranks.
    """
    counts = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
    handle = hvd.allreduce_async_(counts, op=hvd.Sum, name="allstep.have_gradients")

    def missing() -> list[torch.nn.Parameter]:
        hvd.synchronize(handle)
        return [parameter for parameter, count in zip(parameters, counts.tolist(), strict=True) if not count]

    return missing
