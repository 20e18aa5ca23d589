"""What optimizers need that look at the norms of whole weights: LARS, LAMB, NovoGrad."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from allstep.pytorch.compat import norms_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def batches(parameters: Sequence[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """The parameters that have gradients, in lists of those that a multi-tensor operation should take at once.

    All of them: on a GPU a kernel then serves many, and the norms of shards meet in one message. But each by itself in
    the memory of a CPU, whose cache then has in the next operation what the one before has read.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    if parameters and parameters[0].device.type == "cpu" and not is_sharded(parameters[0]):
        yield from ([parameter] for parameter in parameters)
    elif parameters:
        yield parameters


def local(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What this rank holds of each tensor: under FSDP a shard, which shares its memory."""
    # A DTensor's, whose type takes a second to import.
    return [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]  # pyright: ignore[reportAttributeAccessIssue]


def local_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of parameters that have one, likewise."""
    return local([parameter.grad for parameter in parameters if parameter.grad is not None])


def norms(parameters: Sequence[torch.Tensor], *lists: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of each list of tensors, which this rank holds as it holds `parameters`, the norms of the whole tensors.

    They are one tensor a list. All ranks that have shards call it.
    """
    own = torch.stack([norms_of(tensors) for tensors in lists])
    if is_sharded(parameters[0]):
        own = own.square()
        mesh: DeviceMesh = parameters[0].device_mesh  # pyright: ignore[reportAttributeAccessIssue]
        torch.distributed.all_reduce(own, group=mesh.get_group())
        own = own.sqrt()
    return list(own)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this rank has but a part of the tensor, as under FSDP; DTensor has no fused SGD (torch 2.14)."""
    return hasattr(tensor, "to_local")  # DTensor, whose module takes a second to import
