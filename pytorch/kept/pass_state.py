"""Trial of a network in training, judged by `common.training.trial`, and reset of the state that every pass changes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.swa_utils import AveragedModel

from allstep.common.base.random_state import seeded
from allstep.common.training.trial import FACTORS, TRIAL, PassState, are_multiples, try_passes
from allstep.pytorch.compat import BatchNorm
from allstep.pytorch.kept.snapshot import Snapshot, has_extra_state

RUNNING = "running_"
"""Beginning of the names of buffers that ranks average."""
_MOVED = 0.001
_COUNT = "num_batches_tracked"


def pass_state(network: nn.Module) -> PassState:
    """Return the result of a network's trial; an empty one for networks that need no trial."""
    return vars(network).get(TRIAL, PassState())


def note_pass_state(
    network: nn.Module,
    before: Snapshot,
    variants: Sequence[torch.Tensor],
    observer: AbstractContextManager,
    *,
    in_parts: bool,
) -> Any:
    """Run `network` in training, store on it the state that passes change and how they use samples; return its outputs.

    The weights and the state of the network are different afterwards.

    Args:
        before: a snapshot of it; only that of a user's network is whole, since libraries' networks are known.
        variants: those of `common.training.trial.variants_of`.
        observer: surrounds the first pass.
        in_parts: whether to find out what cutting a batch into parts would change: outputs and gradients of a sample
            that depend on other samples, and gradients that depend on their size.
    """
    if before.is_whole and _may_copy_weights(network):
        before = _move_weights(network)
    network.zero_grad()
    first, gradients = list[Any](), list[list[Any]]()
    has_hooks = any(map(_has_hooks, network.modules()))

    def run(number: int, seed: int) -> Any:
        is_compared = before.is_whole and in_parts and number == len(gradients) < len(FACTORS)
        has_gradients = before.is_whole and (has_hooks or is_compared or not first)
        with seeded(seed), torch.set_grad_enabled(has_gradients), nullcontext() if first else observer:
            torch.manual_seed(seed)  # of GPUs as well
            outputs = network(variants[number].clone())  # some change it
        first.append(outputs)
        logits = _logits(outputs)
        found = _gradients(network, logits, FACTORS[number] if is_compared else 1) if has_gradients else []
        if is_compared:
            gradients.append(found)
        return None if logits is None else logits.numpy(force=True)

    def averaged() -> set[str]:
        return {
            f"{name}.{one}".lstrip(".") for name, module in network.named_modules() for one in statistics_of(module)
        }

    norms = [module for module in network.modules() if isinstance(module, BatchNorm) and module.training]
    may_couple = in_parts and before.is_whole and all(type(norm).__module__.startswith("torch.") for norm in norms)
    for norm in norms if may_couple else ():
        norm.eval()  # batch norms couple samples in a known way; the trial looks for other ways
    _, state = try_passes(
        run,
        before,
        averaged=averaged,
        not_saved=lambda names: _not_saved(network, names),
        may_couple=may_couple,
        may_hide=before.is_whole,
    )
    if len(gradients) == 1:
        before.restore()
        run(1, 0)
    for norm in norms:
        norm.train()
    network.zero_grad()
    hooked = next((name for name, one in network.named_parameters() if _is_hooked(one)), None)
    is_nonlinear = bool(gradients) and not are_multiples(*gradients, factor=sum(FACTORS))
    vars(network)[TRIAL] = replace(
        state, hooked_weight=hooked, has_nonlinear_gradients=is_nonlinear, resized=before.resized()
    )
    return first[0]


def _logits(outputs: Any) -> torch.Tensor | None:
    logits = getattr(outputs, "logits", outputs)
    return logits.float() if isinstance(logits, torch.Tensor) else None


@torch.enable_grad()
def _gradients(network: nn.Module, logits: torch.Tensor | None, factor: int) -> list[np.ndarray | None]:
    """Add the gradients of a loss of every second sample to the present ones; return norm and sum of each result.

    They show whether gradients depend on the size of the loss, on the other samples, or on earlier gradients.
    """
    if logits is not None and logits.requires_grad and logits.ndim > 0:
        logits = logits[1::2].flatten()
        factors = torch.arange(logits.numel(), device=logits.device).cos()  # no sum of these is 0
        (logits * factors).mean().mul(factor).backward()
    return [None if one.grad is None else _size(one.grad) for one in network.parameters()]


def _is_hooked(parameter: nn.Parameter) -> bool:
    """Return whether hooks see the gradient of a parameter."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def _has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks in its backward pass, which may change state."""
    return bool(
        module._backward_hooks or module._backward_pre_hooks or any(map(_is_hooked, module.parameters(recurse=False)))
    )


def _size(gradient: torch.Tensor) -> np.ndarray:
    """Return norm and sum of a gradient, (2,), instead of all its numbers."""
    numbers = torch.view_as_real(gradient) if gradient.is_complex() else gradient.to_dense()
    return torch.stack([numbers.float().norm(), numbers.float().sum()]).numpy(force=True)


def _not_saved(network: nn.Module, names: set[str]) -> set[str]:
    """Return those of `names` that `state_dict()` does not have."""
    state = (value for value in network.state_dict().values() if isinstance(value, torch.Tensor))
    kept = {value.data_ptr() for value in state if not nn.parameter.is_lazy(value)}
    tensors = {**dict(network.named_buffers()), **dict(network.named_parameters())}
    with_extra = {name for name, one in network.named_modules() if has_extra_state(one)}
    return {
        name
        for name in names
        if (tensors[name].data_ptr() not in kept if name in tensors else name.rpartition(".")[0] not in with_extra)
    }


def _may_copy_weights(network: nn.Module) -> bool:
    running = {id(one) for one in running_statistics(network)}
    others = (one for one in (*network.parameters(), *network.buffers()) if id(one) not in running)
    return any(one.is_floating_point() and not (one.requires_grad and one.is_leaf) for one in others) or any(
        isinstance(module, AveragedModel) for module in network.modules()
    )


def _move_weights(network: nn.Module) -> Snapshot:
    """Change weights a little, so that they differ from copies and averages of them, and return a snapshot."""
    with torch.no_grad():
        for number, parameter in enumerate(network.parameters()):
            if parameter.requires_grad and not nn.parameter.is_lazy(parameter):
                parameter.mul_(1 + _MOVED * (1 + number % 7))
    return Snapshot(network)


def running_statistics(network: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the buffers that ranks average: those of norms, and others whose names begin with running_."""
    for module in network.modules():
        for name in statistics_of(module):
            if name != _COUNT:
                yield module._buffers[name]  # pyright: ignore[reportReturnType]


def statistics_of(module: nn.Module) -> list[str]:
    """Return the names of a module's buffers that ranks average, with the count of a norm."""
    counts = isinstance(module, _NormBase)
    return [
        name
        for name, one in module._buffers.items()
        if one is not None and ((name.startswith(RUNNING) and one.is_floating_point()) or (counts and name == _COUNT))
    ]


def to_repeat(network: nn.Module) -> Callable[[], None]:
    """Return a function that restores the state that every pass changes alike, so that several passes count as one."""
    names = pass_state(network).constant_changes
    return Snapshot(network, names).restore if names else lambda: None
