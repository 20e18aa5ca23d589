"""State that a pass in training changes by itself, without an optimizer: counters, flags, averages, codebooks.

A trial shows which state this is, and whether it depends on the samples of the pass. What depends on them can be the
same as in one process only where one pass has the whole batch; running statistics alone are averaged over ranks. What
does not depend on them is the same on all ranks, and each pass of a step begins where the first one did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.swa_utils import AveragedModel

from allstep.pytorch.compat import BatchNorm
from allstep.pytorch.kept.snapshot import Snapshot, has_extra_state

_FOUND = "allstep_pass_state"
_RUNNING = "running_"
_MOVED = 0.001
_COUNT = "num_batches_tracked"


@dataclass(frozen=True)
class PassState:
    """Names of what a pass changes: buffers, weights, and attributes of modules."""

    repeated: frozenset[str] = frozenset()
    """Names of what changes alike in each pass, whatever its samples are."""
    sampled: tuple[str, ...] = ()
    """Names of what depends on the samples or on random numbers, without running statistics."""
    forgotten: tuple[str, ...] = ()
    """Names of what `state_dict()` does not have."""
    couples: bool = False
    """Whether the outputs of a sample depend on the others of its pass, otherwise than by batch norm."""
    hooked: str | None = None
    """Name of a weight whose gradient the user's hooks see or change."""


def pass_state(network: nn.Module) -> PassState:
    """Return what the trial of a network has shown; nothing for networks that need none."""
    return vars(network).get(_FOUND, PassState())


def note_pass_state(
    network: nn.Module, before: Snapshot, samples: torch.Tensor, others: torch.Tensor, observer: AbstractContextManager
) -> Any:
    """Run `network` in training and note on it what passes change and how they use samples; return its outputs.

    Its weights and state are other ones afterwards.

    Args:
        before: a snapshot of it; one that is not whole is of a library, which says how its networks use samples.
        others: the same first sample, and others than `samples` after it.
        observer: surrounds the first pass.
    """
    if before.is_whole and _may_copy_weights(network):
        before = _move_weights(network)
    generators = torch.get_rng_state()
    with observer:
        outputs = network(samples)
    running = {f"{name}.{one}".lstrip(".") for name, module in network.named_modules() for one in _statistics(module)}
    changed, sampled = before.changes() - running, set[str]()
    has_norms = any(isinstance(module, BatchNorm) and module.training for module in network.modules())
    couples = False
    if changed or (before.is_whole and not has_norms):
        after = Snapshot(network)
        before.restore()
        torch.set_rng_state(generators)
        again = network(others)
        sampled = after.changes() - running
        couples = before.is_whole and not has_norms and not _same_first(outputs, again)
    state = (value for value in network.state_dict().values() if isinstance(value, torch.Tensor))
    kept = {value.data_ptr() for value in state if not nn.parameter.is_lazy(value)}
    tensors = {**dict(network.named_buffers()), **dict(network.named_parameters())}
    with_extra = {name for name, one in network.named_modules() if has_extra_state(one)}
    hooked = (
        name
        for name, one in network.named_parameters()
        if one._backward_hooks or getattr(one, "_post_accumulate_grad_hooks", None)
    )
    vars(network)[_FOUND] = PassState(
        frozenset(changed - sampled),
        tuple(sorted(sampled)),
        tuple(
            name
            for name in sorted(changed | sampled)
            if (tensors[name].data_ptr() not in kept if name in tensors else name.rpartition(".")[0] not in with_extra)
        ),
        couples,
        next(hooked, None),
    )
    return outputs


def _may_copy_weights(network: nn.Module) -> bool:
    running = {id(one) for one in running_statistics(network)}
    others = (one for one in (*network.parameters(), *network.buffers()) if id(one) not in running)
    return any(one.is_floating_point() and not (one.requires_grad and one.is_leaf) for one in others) or any(
        isinstance(module, AveragedModel) for module in network.modules()
    )


def _move_weights(network: nn.Module) -> Snapshot:
    """Change weights a little, since copies and averages of them begin as they do, and return a snapshot."""
    with torch.no_grad():
        for number, parameter in enumerate(network.parameters()):
            if parameter.requires_grad and not nn.parameter.is_lazy(parameter):
                parameter.mul_(1 + _MOVED * (1 + number % 7))
    return Snapshot(network)


def _same_first(outputs: Any, others: Any) -> bool:
    """Return whether the outputs of the first sample are the same; true for outputs that are no tensors."""
    outputs, others = getattr(outputs, "logits", outputs), getattr(others, "logits", others)
    if not isinstance(outputs, torch.Tensor) or outputs.dim() == 0:
        return True
    return torch.allclose(outputs[0].float(), others[0].float(), rtol=1e-3, atol=1e-4, equal_nan=True)


def running_statistics(network: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the buffers that ranks average: those of norms, and others whose names begin with running_."""
    for module in network.modules():
        for name in _statistics(module):
            if name != _COUNT:
                yield module._buffers[name]  # pyright: ignore[reportReturnType]


def _statistics(module: nn.Module) -> list[str]:
    counts = isinstance(module, _NormBase)
    return [
        name
        for name, one in module._buffers.items()
        if one is not None and ((name.startswith(_RUNNING) and one.is_floating_point()) or (counts and name == _COUNT))
    ]


def to_repeat(network: nn.Module) -> Callable[[], None]:
    """Return a function that puts back what each pass changes alike, so that several passes are one."""
    names = pass_state(network).repeated
    return Snapshot(network, names).restore if names else lambda: None
