"""State that a pass in training changes by itself, without an optimizer: counters, flags, averages, codebooks.

A trial shows which state this is, and whether it depends on the samples of the pass. What depends on them can be the
same as in one process only where one pass has the whole batch; running statistics alone are averaged over ranks. What
does not depend on them is the same on all ranks, and each pass of a step begins where the first one did.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.swa_utils import AveragedModel

from allstep.pytorch.compat import BatchNorm
from allstep.pytorch.kept.extra_state import encode
from allstep.pytorch.kept.network_state import is_lazy

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set, deque)
_OURS, _FOUND, _EXTRA = "allstep_", "allstep_pass_state", "_extra_state"
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


class Snapshot:
    """Tensors and attributes of a network, to be compared, and put back after a pass that must not count."""

    def __init__(self, network: nn.Module, names: Container[str] | None = None) -> None:
        """`names` are those of what is kept; by default all is."""
        # Lazy modules are what their first pass makes of them.
        self._modules = [(path, one) for path, one in network.named_modules() if not is_lazy(one)]
        self.is_whole = names is None
        self._tensors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._attributes: dict[str, dict[str, Any]] = {}
        # A scripted module's buffers are in its program.
        self._buffers = [(one, dict(one._buffers)) for _, one in self._modules if not _is_script(one)]
        for path, module in self._modules:
            prefix = f"{path}." if path else ""
            for name, one in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                if names is None or prefix + name in names:
                    self._tensors[prefix + name] = one, one.detach().clone()
            found = {n: _copy(v) for n, v in _attributes(module).items() if names is None or prefix + n in names}
            self._attributes[path] = found
        self._extra = {
            f"{path}.{_EXTRA}".lstrip("."): (module, copy.deepcopy(module.get_extra_state()))
            for path, module in self._modules
            if has_extra_state(module) and (names is None or f"{path}.{_EXTRA}".lstrip(".") in names)
        }

    @torch.no_grad()
    def restore(self) -> None:
        """Put all of it back."""
        for tensor, value in self._tensors.values():
            if tensor.shape != value.shape:
                tensor.resize_(value.shape)
            tensor.copy_(value)
        for path, module in self._modules:
            own, before = vars(module), self._attributes[path]
            if self.is_whole:
                for name in _attributes(module).keys() - before.keys():
                    del own[name]
            for name, value in before.items():
                own[name] = _put_back(value)
        for module, buffers in self._buffers:
            module._buffers.update(buffers)
        for module, state in self._extra.values():
            module.set_extra_state(copy.deepcopy(state))

    def changes(self) -> set[str]:
        """Return the names of what has changed since."""
        changed = set()
        for path, module in self._modules:
            prefix = f"{path}." if path else ""
            now = dict((*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)))
            for name, one in now.items():
                kept = self._tensors.get(prefix + name)
                if not _equal(one, kept[1]) if kept else self.is_whole:
                    changed.add(prefix + name)
            before, after = self._attributes[path], _attributes(module)
            for name in before.keys() | (after.keys() if self.is_whole else ()):
                if name not in before or name not in after or not _is_same(before[name], after[name]):
                    changed.add(prefix + name)
        for name, (module, state) in self._extra.items():
            if not torch.equal(encode(module.get_extra_state()), encode(state)):
                changed.add(name)
        return changed


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that hold a state of its own."""
    if _is_script(module):
        return {}
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _OF_TORCH and not name.startswith(_OURS) and isinstance(value, _KEPT)
    }


_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_KEPT = (*_PLAIN, *_CONTAINERS, torch.Tensor, np.ndarray, *_GENERATORS)
_OF_TORCH = {"training", "_flat_weights", *vars(nn.Module())}


def _copy(value: Any) -> tuple[Any, Any]:
    """Return a value of an attribute, and what it holds now."""
    if isinstance(value, torch.Tensor):
        return value, value.detach().clone() if value.layout == torch.strided else None
    if isinstance(value, torch.Generator):
        return value, value.get_state()
    if isinstance(value, (*_CONTAINERS, np.ndarray)):
        return value, copy.copy(value)
    return value, copy.deepcopy(value)


def _put_back(kept: tuple[Any, Any]) -> Any:
    value, content = kept
    if isinstance(value, torch.Tensor) and content is not None:
        value.data.copy_(content)
    elif isinstance(value, torch.Generator):
        value.set_state(content)
    elif isinstance(value, random.Random):
        value.setstate(content.getstate())
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = content.bit_generator.state
    elif isinstance(value, np.random.RandomState):
        value.set_state(content.get_state())
    elif isinstance(value, np.ndarray):
        value[...] = content
    elif isinstance(value, (list, deque, set, dict)):
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(content)
    return value


def _is_same(kept: tuple[Any, Any], value: Any) -> bool:
    before, content = kept
    if isinstance(value, torch.Tensor):
        return content is None or (isinstance(before, torch.Tensor) and _equal(value, content))
    if isinstance(value, torch.Generator):
        return before is value and torch.equal(value.get_state(), content)
    if isinstance(value, random.Random):
        return before is value and value.getstate() == content.getstate()
    if isinstance(value, np.random.Generator):
        return before is value and str(value.bit_generator.state) == str(content.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return before is value and str(value.get_state(legacy=False)) == str(content.get_state(legacy=False))
    if isinstance(value, np.ndarray):
        return isinstance(content, np.ndarray) and value.tobytes() == content.tobytes()
    if isinstance(value, _CONTAINERS):
        return type(value) is type(content) and len(value) == len(content) and _items(value) == _items(content)
    return type(value) is type(content) and (value == content or value != value)


def _items(values: Any) -> list[Any]:
    """Return the items of a container, those that are not plain by their types."""
    pairs = values.items() if isinstance(values, dict) else ((None, one) for one in values)
    items = [(key, one if isinstance(one, _PLAIN) else type(one)) for key, one in pairs]
    return sorted(items, key=repr) if isinstance(values, set) else items


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors have the same bits; sparse ones are taken for constants."""
    if one.layout != torch.strided or one.is_quantized or one.is_meta:
        return True
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one, other) or torch.equal(_bits(one), _bits(other))  # nan has bits that are the same


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().contiguous().reshape(-1)
    return tensor.view(torch.uint8) if tensor.numel() else tensor


def has_extra_state(module: nn.Module) -> bool:
    """Return whether a module has a state besides its tensors."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _is_script(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)
