"""What we use of the insides of PyTorch and of Horovod's part for it; `tests/pytorch/test_compat.py` tries each.

Nothing here is promised by its library. Each function names the version in which it was looked up.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

BatchNorm = _BatchNorm
"""The base class of BatchNorm1d, 2d and 3d (torch 2.14), which `isinstance` finds of any dimension."""


def without_compiler(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """The same optimizer, by methods that torch 2.14 has not wrapped for torch.compile.

    The wrappers import the compiler when they are called first: 1.9 of the 4.8 s of CPU that a rank takes to start.
    Nothing is compiled here. They are made by functools.wraps, so that inspect.unwrap finds what they wrap.
    """
    names = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    # Its wrapper also switches gradients off.
    methods["step"] = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), methods)


def set_max_programs(number: int) -> None:
    """How many programs torch.compile makes of one piece of code, as for sizes of its input; then it runs it as it is.

    It is 8 by default. torch 2.14 takes it as an argument as well; torch 2.9 by its configuration alone.
    """
    import torch._dynamo  # it takes seconds

    torch._dynamo.config.recompile_limit = number


def sgd_step(optimizer: torch.optim.SGD) -> None:
    """A step of torch 2.14's SGD, without the wrapper of which `without_compiler` speaks; it needs torch.no_grad."""
    inspect.unwrap(torch.optim.SGD.step)(optimizer)


# Multi-tensor operations, of which torch 2.14's own optimizers are made: on a GPU a kernel serves many tensors.


def scaled(tensors: Sequence[torch.Tensor], factor: float) -> list[torch.Tensor]:
    """Each tensor times the factor."""
    return list(torch._foreach_mul(list(tensors), factor))  # pyright: ignore[reportPrivateImportUsage]


def scale(tensors: Sequence[torch.Tensor], factors: Sequence[torch.Tensor] | torch.Tensor) -> None:
    """Multiply the tensors by a factor each, or all by one, in place."""
    torch._foreach_mul_(list(tensors), factors)  # pyright: ignore[reportPrivateImportUsage, reportCallIssue, reportArgumentType]


def add(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor], *, factor: float) -> None:
    """Add the factor times each of `others` to the tensors, in place."""
    torch._foreach_add_(list(tensors), list(others), alpha=factor)  # pyright: ignore[reportPrivateImportUsage]


def add_products(
    tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor], numbers: Sequence[torch.Tensor], *, factor: float
) -> None:
    """Add the factor times each of `others` times its number to the tensors, in place, in one pass over them."""
    torch._foreach_addcmul_(list(tensors), list(others), list(numbers), value=factor)  # pyright: ignore[reportPrivateImportUsage]


def move_towards(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor], share: float) -> None:
    """Have the tensors go that share of the way to `others`, in place."""
    torch._foreach_lerp_(list(tensors), list(others), share)  # pyright: ignore[reportPrivateImportUsage]


def norms_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The Euclidean norm of each tensor."""
    return torch.stack(torch._foreach_norm(list(tensors)))  # pyright: ignore[reportPrivateImportUsage]


def share_tensors(module: torch.nn.Module, other: torch.nn.Module) -> None:
    """Make the parameters and buffers of `module` those of `other`.

    A module of torch 2.14 keeps them in two dictionaries, `_parameters` and `_buffers`.
    """
    module.__dict__["_parameters"], module.__dict__["_buffers"] = other._parameters, other._buffers


def gloo_is_busy() -> bool:
    """Whether a thread of Gloo's computes or waits for a core.

    torch 2.14 names its threads `pt_gloo_runloop`; the state follows the name in /proc.
    """
    for stat in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            if "(pt_gloo_runloop) R" in stat.read_text():
                return True
    return False


def takes_cpu_tensors() -> bool:
    """Whether torch's default process group takes tensors in the memory of hosts; NCCL alone does not.

    A group of torch 2.14 has the devices for which it has a backend in `_device_types`.
    """
    return torch.device("cpu") in torch.distributed.group.WORLD._device_types  # pyright: ignore


def all_gather(
    gathered: torch.Tensor,
    own: torch.Tensor,
    *,
    group: torch.distributed.ProcessGroup | None = None,
    async_op: bool = False,
) -> torch.distributed.Work | None:
    """Bring together tensors of one size, one after the other: by the function that torch 2.14 does not warn of."""
    call = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
    return call(gathered, own, group=group, async_op=async_op)


def reduce_scatter(shard: torch.Tensor, tensor: torch.Tensor) -> None:
    """Add up tensors and give each rank a shard of the sum: by the function that torch 2.14 does not warn of."""
    call = getattr(torch.distributed, "reduce_scatter_single", None) or torch.distributed.reduce_scatter_tensor
    call(shard, tensor)


def all_reduce_handles(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """The handles of the all-reduces that Horovod 0.28.1's DistributedOptimizer has started, by parameter.

    `_handles` has a pair for each parameter whose gradient is there; its handle is None where gradients are still
    being added up. Another thread may call this while the optimizer steps.
    """
    names, handles = optimizer._parameter_names, optimizer._handles  # pyright: ignore[reportAttributeAccessIssue]
    return {names[parameter]: handle for parameter, (handle, _) in list(handles.items()) if handle is not None}


def unscale(gradients: list[torch.Tensor], scale: float, device: torch.device) -> torch.Tensor:
    """Divide gradients, which lie on `device`, by `scale` in place, in one kernel.

    torch.amp.GradScaler of torch 2.9 to 2.14 calls it as well, but knows neither shards nor other ranks.

    Returns: one element, above 0 where an element of a gradient is not finite.
    """
    overflow = torch.zeros(1, device=device)
    inverse = torch.full((1,), 1 / scale, device=device)
    check_and_unscale = torch._amp_foreach_non_finite_check_and_unscale_  # pyright: ignore[reportPrivateImportUsage]
    check_and_unscale(gradients, overflow, inverse)
    return overflow


def known_arguments(function: Callable[..., object], **arguments: bool) -> dict[str, Any]:
    """Those of the arguments that a function has in the version of torch at hand; `numerics.py` says which may be."""
    return {name: value for name, value in arguments.items() if name in inspect.signature(function).parameters}
