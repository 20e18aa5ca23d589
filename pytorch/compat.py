"""Internals of PyTorch and of `horovod.torch` on which allstep depends; `tests/pytorch/test_compat.py` tests each.

The libraries do not promise any of this. Each function names the version for which it was checked.
"""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

BatchNorm = _BatchNorm
"""Base class of BatchNorm1d, BatchNorm2d and BatchNorm3d (torch 2.14), for `isinstance`."""


def without_compiler(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """Return a subclass of the optimizer class without the wrappers that torch 2.14 has for torch.compile.

    Their first call imports the compiler, which takes 1.9 of the 4.8 s of CPU time in which a rank starts; optimizers
    are not compiled here. The wrappers are made by functools.wraps, so inspect.unwrap finds the wrapped method.
    """
    names = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    # The wrapper of `step` also disables gradients.
    methods["step"] = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), methods)


def set_max_programs(number: int) -> None:
    """Limit how often torch.compile recompiles a function, e.g. for new input sizes, before it runs it uncompiled.

    The default is 8. torch 2.9 takes the limit only from its configuration; torch 2.14 also as an argument.
    """
    import torch._dynamo  # takes seconds

    torch._dynamo.config.recompile_limit = number


def sgd_step(optimizer: torch.optim.SGD) -> None:
    """Take a step of torch 2.14's SGD without its wrapper (see `without_compiler`); call it in torch.no_grad.

    Its kernels need velocities of all weights or of none, and dense gradients. A weight whose first gradient comes
    later starts with a velocity of zero, which has the same effect as none.
    """
    for group in optimizer.param_groups:
        trained = [one for one in group["params"] if one.grad is not None]
        has_sparse = any(one.grad.is_sparse for one in trained)
        if has_sparse:
            group["fused"] = None
        if not group["momentum"]:
            continue
        states = [optimizer.state[one] for one in trained]
        if has_sparse or any(state.get("momentum_buffer") is not None for state in states):
            for parameter, state in zip(trained, states, strict=True):
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
    inspect.unwrap(torch.optim.SGD.step)(optimizer)


# Multi-tensor operations, which torch 2.14's optimizers use: on a GPU one kernel handles many tensors.


def scaled(tensors: Sequence[torch.Tensor], factor: float) -> list[torch.Tensor]:
    """Return each tensor times the factor."""
    return list(torch._foreach_mul(list(tensors), factor))  # pyright: ignore[reportPrivateImportUsage]


def scale(tensors: Sequence[torch.Tensor], factors: Sequence[torch.Tensor] | torch.Tensor) -> None:
    """Multiply each tensor by its factor, or all by a single one, in place."""
    torch._foreach_mul_(list(tensors), factors)  # pyright: ignore[reportPrivateImportUsage, reportCallIssue, reportArgumentType]


def add(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor], *, factor: float) -> None:
    """Add `factor * other` to each tensor, in place."""
    torch._foreach_add_(list(tensors), list(others), alpha=factor)  # pyright: ignore[reportPrivateImportUsage]


def add_products(
    tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor], numbers: Sequence[torch.Tensor], *, factor: float
) -> None:
    """Add `factor * other * number` to each tensor, in place and in a single pass over memory."""
    torch._foreach_addcmul_(list(tensors), list(others), list(numbers), value=factor)  # pyright: ignore[reportPrivateImportUsage]


def move_towards(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor], share: float) -> None:
    """Interpolate from each tensor to its counterpart in `others`, in place; a share of 1 gives `others`."""
    torch._foreach_lerp_(list(tensors), list(others), share)  # pyright: ignore[reportPrivateImportUsage]


def norms_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the Euclidean norm of each tensor, as one tensor."""
    return torch.stack(torch._foreach_norm(list(tensors)))  # pyright: ignore[reportPrivateImportUsage]


def keeps_buffers(stage: type) -> bool:
    """Return whether a pipeline stage restores its buffers after it has inferred the shapes of its outputs.

    torch 2.9 to 2.13 run its layers on made-up inputs for that, which changes the statistics of batch norms.
    """
    return hasattr(stage, "_pre_metadata_inference_backup")


def gloo_is_busy() -> bool:
    """Return whether a Gloo thread is computing or waiting for a core.

    torch 2.14 names these threads `pt_gloo_runloop`; in /proc, the state follows the name.
    """
    for stat in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            if "(pt_gloo_runloop) R" in stat.read_text():
                return True
    return False


def is_transforming() -> bool:
    """Return whether a function of torch.func, such as vmap or jvp, calls this code (torch 2.14)."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]


def takes_cpu_tensors() -> bool:
    """Return whether torch's default process group takes CPU tensors, which NCCL does not.

    In torch 2.14, `_device_types` lists the devices for which a group has a backend.
    """
    return torch.device("cpu") in torch.distributed.group.WORLD._device_types  # pyright: ignore


def all_gather(
    gathered: torch.Tensor,
    own: torch.Tensor,
    *,
    group: torch.distributed.ProcessGroup | None = None,
    async_op: bool = False,
) -> torch.distributed.Work | None:
    """Concatenate the ranks' tensors, which have the same size, by the function that torch 2.14 has not deprecated."""
    call = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
    return call(gathered, own, group=group, async_op=async_op)


def reduce_scatter(shard: torch.Tensor, tensor: torch.Tensor) -> None:
    """Sum the ranks' tensors and return a shard to each, by the function that torch 2.14 has not deprecated."""
    call = getattr(torch.distributed, "reduce_scatter_single", None) or torch.distributed.reduce_scatter_tensor
    call(shard, tensor)


def all_reduce_handles(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the handles of the all-reduces that Horovod 0.28.1's DistributedOptimizer has started, by parameter name.

    `_handles` has a pair for each parameter whose gradient is computed; the handle in it is None while gradients are
    being accumulated. This may be called from another thread while the optimizer steps.
    """
    names, handles = optimizer._parameter_names, optimizer._handles  # pyright: ignore[reportAttributeAccessIssue]
    return {names[parameter]: handle for parameter, (handle, _) in list(handles.items()) if handle is not None}


def unscale(gradients: list[torch.Tensor], scale: float, device: torch.device) -> torch.Tensor:
    """Divide gradients, which are on `device`, by `scale` in place, in one kernel.

    torch.amp.GradScaler of torch 2.9 to 2.14 uses the same kernel, but supports neither shards nor several ranks.

    Returns: a tensor with one element, which is positive if any gradient has an infinite or NaN element.
    """
    overflow = torch.zeros(1, device=device)
    inverse = torch.full((1,), 1 / scale, device=device)
    check_and_unscale = torch._amp_foreach_non_finite_check_and_unscale_  # pyright: ignore[reportPrivateImportUsage]
    check_and_unscale(gradients, overflow, inverse)
    return overflow


def known_arguments(function: Callable[..., object], **arguments: bool) -> dict[str, Any]:
    """Return the arguments that the function has in the installed version of torch (`numerics.py` has the range)."""
    return {name: value for name, value in arguments.items() if name in inspect.signature(function).parameters}
