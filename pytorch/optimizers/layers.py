"""Norms of whole weights for the optimizers that depend on them: LARS, LAMB, NovoGrad."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from allstep.pytorch.compat import all_gather, norms_of, sgd_step

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_CACHED = 2**17
"""Number of weights whose gradients, moments and so on fit together into the cache of a core."""


def batches(parameters: Sequence[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Yield lists of parameters with gradients that a multi-tensor operation should process at once.

    On a GPU, or with shards, that is all of them: one kernel, and one message for the norms. On a CPU it is as many as
    fit into its cache, so that each operation finds there what the one before has read.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    maximum = (
        _CACHED if parameters and parameters[0].device.type == "cpu" and not is_sharded(parameters[0]) else math.inf
    )
    batch: list[torch.nn.Parameter] = []
    for parameter in parameters:
        if batch and sum(map(torch.numel, [*batch, parameter])) > maximum:
            yield batch
            batch = []
        batch.append(parameter)
    if batch:
        yield batch


def local(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the local part of each tensor: under FSDP a shard, which shares its memory."""
    return [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]  # pyright: ignore[reportAttributeAccessIssue]


def local_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the local part of the gradients of all parameters that have one."""
    return local([parameter.grad for parameter in parameters if parameter.grad is not None])


class LayerwiseSGD(torch.optim.SGD):
    """SGD with momentum on gradients that `change` has rescaled layer by layer. A step changes the gradients."""

    def __init__(
        self, groups: Iterable[dict], *, lr: float, momentum: float, weight_decay: float, **options: Any
    ) -> None:
        """`options` are defaults of further options of the groups."""
        super().__init__(groups, lr=lr, momentum=momentum, weight_decay=weight_decay, fused=True)
        # If true, a GradScaler would pass scaled gradients, which would change their norms.
        self._step_supports_amp_scaling = False
        for group in self.param_groups:
            for name, value in {"sliced": False, **options}.items():
                group.setdefault(name, value)
            # SGD would add the decay after the change.
            group["layer_decay"] = group.pop("layer_decay", group["weight_decay"])
            group["weight_decay"] = 0.0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameters in batches(group["params"]):
                self.change(parameters, local_gradients(parameters), group)
        sgd_step(self)

    def change(self, parameters: Sequence[torch.Tensor], gradients: list[torch.Tensor], group: dict) -> None:
        """Rescale the gradients of these parameters of a group in place, and add the group's `layer_decay`."""
        raise NotImplementedError


def norms(
    parameters: Sequence[torch.Tensor], *lists: Sequence[torch.Tensor], sliced: bool = False
) -> list[torch.Tensor]:
    """Return one tensor per list with the norms of its whole tensors, which are sharded over ranks like `parameters`.

    All ranks that have shards call it. With --slices (`sliced`) no bit may depend on how tensors are cut, so shards are
    gathered first.
    """
    in_parts = is_sharded(parameters[0])
    if in_parts and sliced:
        lists, in_parts = tuple(whole(parameters, tensors) for tensors in lists), False
    own = torch.stack([norms_of(tensors) for tensors in lists])
    if in_parts:
        own = own.square()
        mesh: DeviceMesh = parameters[0].device_mesh  # pyright: ignore[reportAttributeAccessIssue]
        torch.distributed.all_reduce(own, group=mesh.get_group())
        own = own.sqrt()
    return list(own)


def whole(parameters: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gather whole tensors from the ranks' `shards`, which are cut along the first axis like `parameters`."""
    mesh: DeviceMesh = parameters[0].device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    # The first ranks have as many rows, the last ones fewer or none.
    sizes = [-(-len(one) // mesh.size()) * math.prod(one.shape[1:]) for one in parameters]
    pad = torch.nn.functional.pad
    own = torch.cat([pad(one.flatten(), (0, size - one.numel())) for one, size in zip(shards, sizes, strict=True)])
    gathered = own.new_empty(mesh.size() * len(own))
    all_gather(gathered, own, group=mesh.get_group())
    # Each in memory of its own: on a GPU sums depend on where a tensor begins.
    return [
        torch.cat([*rows])[: parameter.numel()].view(parameter.shape)
        for parameter, rows in zip(parameters, gathered.view(mesh.size(), -1).split(sizes, 1), strict=True)
    ]


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether this rank has only a part of the tensor, as under FSDP."""
    return hasattr(tensor, "to_local")  # DTensor, whose module takes a second to import
