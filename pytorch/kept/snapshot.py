"""Snapshots of the state of a network: tensors, attributes, generators and extra state, to be compared and put back."""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from allstep.common.base.random_state import state_of
from allstep.pytorch.kept.extra_state import encode, is_dense
from allstep.pytorch.kept.network_state import is_lazy
from allstep.pytorch.kept.outside import outside_state

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, tuple, dict, set, deque)
_WRITABLE: tuple[Any, ...] = (list, OrderedDict, dict, set, deque)
_OURS, _EXTRA = "allstep_", "_extra_state"


class Snapshot:
    """Copy of a network's tensors and attributes, to compare them with later ones, or to restore them."""

    def __init__(
        self, network: nn.Module, names: Container[str] | None = None, *, unchanged: Mapping[str, torch.Tensor] = {}
    ) -> None:
        """Copy the state of a network.

        Args:
            names: names of the state to copy, by default all.
            unchanged: copies of an earlier snapshot to share, of tensors that have not changed since.
        """

        def is_wanted(name: str) -> bool:
            return names is None or name in names

        self._network = network
        # Lazy modules are what their first pass makes of them.
        self._modules = [
            (f"{path}." if path else "", module) for path, module in network.named_modules() if not is_lazy(module)
        ]
        self.is_whole = names is None
        self._tensors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._attributes: dict[str, dict[str, Any]] = {}
        self._buffers: dict[str, dict[str, torch.Tensor | None]] = {}
        self._extra: dict[str, tuple[nn.Module, Any]] = {}
        for prefix, module in self._modules:
            for name, one in _tensors_of(module):
                if is_wanted(prefix + name):
                    known = unchanged.get(prefix + name)
                    self._tensors[prefix + name] = one, one.detach().clone() if known is None else known
            found = {name: copied(value) for name, value in _attributes(module).items() if is_wanted(prefix + name)}
            self._attributes[prefix] = found
            if not _is_script(module):  # a scripted module's buffers are in its program
                self._buffers[prefix] = {n: b for n, b in module._buffers.items() if is_wanted(prefix + n)}
            if has_extra_state(module) and is_wanted(prefix + _EXTRA):
                self._extra[prefix + _EXTRA] = module, copy.deepcopy(module.get_extra_state())
        self._outside = {
            name: (copied(value), assign)
            for name, value, assign in outside_state(network)
            if is_wanted(name) and (isinstance(value, _KEPT) or _is_object(value))
        }

    def next(self, changed: Collection[str]) -> Snapshot:
        """Return a snapshot of the present state, which differs from this one only in the names of `changed`."""
        same = {name: value for name, (_, value) in self._tensors.items() if name not in changed}
        return Snapshot(self._network, unchanged=same)

    @torch.no_grad()
    def restore(self, *, without: Collection[str] = ()) -> None:
        """Restore the state, except for the names of `without`."""
        for name, (tensor, value) in self._tensors.items():
            if name in without:
                continue
            if tensor.shape != value.shape:
                tensor.resize_(value.shape)
            tensor.copy_(value)
        for prefix, module in self._modules:
            own, before = vars(module), self._attributes[prefix]
            if self.is_whole:
                for name in _attributes(module).keys() - before.keys():
                    if prefix + name not in without:
                        del own[name]
            for name, value in before.items():
                if prefix + name not in without:
                    own[name] = _put_back(value)
            if buffers := self._buffers.get(prefix):
                module._buffers.update({name: one for name, one in buffers.items() if prefix + name not in without})
        now = {name: value for name, value, _ in outside_state(self._network)}
        for name, (value, assign) in self._outside.items():
            if name not in without and not is_same(value, now.get(name)):
                assign(_put_back(value))
        for module, state in self._extra.values():
            module.set_extra_state(copy.deepcopy(state))

    def resized(self) -> frozenset[str]:
        """Return the names of buffers whose shape has changed since."""
        now, buffers = dict(self._network.named_buffers()), self._tensors.items()
        return frozenset(name for name, (_, value) in buffers if name in now and now[name].shape != value.shape)

    def changes(self) -> set[str]:
        """Return the names of the state that has changed since."""
        changed = set()
        for prefix, module in self._modules:
            for name, one in _tensors_of(module):
                kept = self._tensors.get(prefix + name)
                if not _equal(one, kept[1]) if kept else self.is_whole:
                    changed.add(prefix + name)
            before, after = self._attributes[prefix], _attributes(module)
            for name in before.keys() | (after.keys() if self.is_whole else ()):
                if name not in before or name not in after or not is_same(before[name], after[name]):
                    changed.add(prefix + name)
        now = {name: value for name, value, _ in outside_state(self._network)}
        changed |= {name for name, (value, _) in self._outside.items() if not is_same(value, now.get(name))}
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
        if name not in _OF_TORCH and not name.startswith(_OURS) and (isinstance(value, _KEPT) or _is_object(value))
    }


_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_KEPT = (*_PLAIN, *_CONTAINERS, torch.Tensor, np.ndarray, *_GENERATORS)
_OF_TORCH = {"training", "_flat_weights", *vars(nn.Module())}
_LIBRARIES = (sys.stdlib_module_names - {"types"}) | {"torch", "allstep"}
"""Packages whose objects hold no state of a network, except for types.SimpleNamespace."""
_MAX_DEPTH = 3
"""Maximum depth of nested containers that are copied; the state of an LSTM is a pair of tensors in a list."""


def copied(value: Any, depth: int = 0) -> tuple[Any, Any]:
    """Return the value of an attribute and a copy of its content; the copy is None for kinds that are not compared."""
    if isinstance(value, _PLAIN):
        return value, value
    if isinstance(value, torch.Tensor):
        is_kept = is_dense(value) and not (depth and isinstance(value, nn.Parameter))
        return value, value.detach().clone() if is_kept else None
    if isinstance(value, torch.Generator):
        return value, value.get_state()
    if isinstance(value, (set, np.ndarray)):
        return value, copy.copy(value)
    if isinstance(value, _CONTAINERS) or _is_object(value):
        is_read = depth < _MAX_DEPTH and not _computes_items(value)
        return value, {k: copied(one, depth + 1) for k, one in _items(value)} if is_read else None
    return value, copy.deepcopy(value) if isinstance(value, _KEPT) else None


def _put_back(kept: tuple[Any, Any]) -> Any:
    value, content = kept
    if content is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        value.data.copy_(content)
    elif isinstance(value, torch.Generator):
        value.set_state(content)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = content.bit_generator.state
    elif isinstance(value, (random.Random, np.random.RandomState)):
        cast("Any", value).__setstate__(content.__getstate__())
    elif isinstance(value, np.ndarray):
        value[...] = content
    elif kind := next((kind for kind in _WRITABLE if isinstance(value, kind)), None):
        kind.clear(value)  # a library's class may refuse changes, or change what it is given, by methods of its own
        if issubclass(kind, dict):
            for key, one in content.items():
                kind.__setitem__(value, key, _put_back(one))
        else:
            fill = kind.update if kind is set else kind.extend
            fill(value, content if kind is set else map(_put_back, content.values()))
    elif isinstance(value, tuple):
        for one in content.values():
            _put_back(one)
    elif _is_object(value):
        for name in vars(value).keys() - content.keys():
            del vars(value)[name]
        vars(value).update({name: _put_back(one) for name, one in content.items()})
    return value


def is_same(kept: tuple[Any, Any], value: Any) -> bool:
    """Return whether `value` equals the attribute of which `copied` returned `kept`."""
    before, content = kept
    if isinstance(before, _PLAIN):
        return type(before) is type(value) and (value == content or value != value)
    if content is None:
        return type(before) is type(value)
    if isinstance(value, torch.Tensor):
        return isinstance(before, torch.Tensor) and _equal(value, content)
    if isinstance(value, torch.Generator):
        return before is value and torch.equal(value.get_state(), content)
    if isinstance(value, _GENERATORS):
        return before is value and state_of(value) == state_of(content)
    if isinstance(value, np.ndarray):
        return isinstance(before, np.ndarray) and value.tobytes() == content.tobytes()
    if type(before) is not type(value):
        return False
    if isinstance(value, set):
        return _listed(value) == _listed(content)
    if isinstance(value, _CONTAINERS) or _is_object(value):
        items = dict(_items(value))
        return items.keys() == content.keys() and all(is_same(content[key], one) for key, one in items.items())
    return value == content or value != value


def _is_object(value: Any) -> bool:
    """Return whether a value is an instance of a user's class, or a namespace, so that its attributes may be state."""
    is_users = type(value).__module__.partition(".")[0] not in _LIBRARIES and hasattr(value, "__dict__")
    return is_users and not isinstance(value, (nn.Module, torch.optim.Optimizer, type))


def _computes_items(value: Any) -> bool:
    """Return whether reading a container runs code of its class, as mappings do that import what is asked for."""
    kind = type(value)
    if isinstance(value, dict):
        return kind.items not in (dict.items, OrderedDict.items)
    return isinstance(value, _CONTAINERS) and kind.__iter__ not in [base.__iter__ for base in _CONTAINERS]


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values of a container, or of the attributes of an object."""
    if isinstance(value, (list, tuple, deque, set)):
        return enumerate(value)
    return tuple((value if isinstance(value, dict) else vars(value)).items())


def _listed(values: set[Any]) -> list[Any]:
    """Return the items of a set in a fixed order, with the types of those that are not plain values."""
    return sorted((one if isinstance(one, _PLAIN) else type(one) for one in values), key=repr)


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers of a module except nested tensors, which are assumed to be constant."""
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return ((name, one) for name, one in tensors if not one.is_nested)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors have the same bits; tensors that are not dense are assumed to be constant."""
    if not is_dense(one) or one.is_meta:
        return True
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one, other) or torch.equal(_bits(one), _bits(other))  # nan has bits that are the same


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().contiguous().reshape(-1)
    return tensor.view(torch.uint8) if tensor.numel() else tensor


def has_extra_state(module: nn.Module) -> bool:
    """Return whether a module has extra state besides its tensors."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _is_script(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)
