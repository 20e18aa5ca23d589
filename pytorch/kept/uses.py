"""How a network uses its weights in a trial pass, for FSDP, which exchanges weights.

FSDP may shard a layer by itself if only the layer's own forward uses its weights, if FSDP sees the layer's outputs, if
it changes no input in place, which are views of FSDP's, and if the pass computes no derivative of it, after which FSDP
would drop weights that the backward pass needs. All other weights are gathered while the whole network computes. FSDP
would not train a weight that the network also keeps outside its module.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from allstep.pytorch.compat import is_transforming

_OPEN, _ELSEWHERE = "allstep_is_open", "allstep_kept_elsewhere"
_VISIBLE = (torch.Tensor, bool, int, float, str, type(None))
_DERIVATIVES = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


def is_open(layer: nn.Module) -> bool:
    """Return whether weights or outputs of `layer` are used where FSDP does not see it."""
    return getattr(layer, _OPEN, False)


def kept_elsewhere(network: nn.Module) -> str | None:
    """Return the name of a weight that `network` uses other than through its module, or None."""
    return getattr(network, _ELSEWHERE, None)


@contextlib.contextmanager
def noting_uses(network: nn.Module) -> Iterator[None]:
    """Note on the modules of `network` how a pass uses their weights."""
    running, entered, versions = list[nn.Module](), list[nn.Module](), list[list[tuple[torch.Tensor, int]]]()

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        running.append(module)
        entered.append(module)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        versions.append([(tensor, tensor._version) for tensor in tensors])
        if is_transforming():
            setattr(module, _OPEN, True)

    def leave(module: nn.Module, _inputs: Any, outputs: Any) -> None:
        running.pop()
        changes_inputs = any(tensor._version != version for tensor, version in versions.pop())
        if changes_inputs or not all(isinstance(leaf, _VISIBLE) for leaf in tree_leaves(outputs)):
            setattr(module, _OPEN, True)

    with contextlib.ExitStack() as stack:
        for module in _pythons(network):
            before_it = module.register_forward_pre_hook(enter, with_kwargs=True)
            for handle in (before_it, module.register_forward_hook(leave)):
                stack.callback(handle.remove)
        before = {id(one): name for name, one in network.named_parameters()}
        owners: dict[int, list[nn.Module]] = {}
        stack.enter_context(_exchanged(network))
        for module in network.modules():
            for parameter in module.parameters():
                before.pop(id(parameter), None)  # it was not exchanged
                owners.setdefault(id(parameter), []).append(module)
        stack.enter_context(_Uses(network, owners, running, entered, before))
        yield


class _Uses(TorchFunctionMode):
    """Sees each function of torch that takes weights and returns tensors."""

    def __init__(
        self,
        network: nn.Module,
        owners: dict[int, list[nn.Module]],
        running: list[nn.Module],
        entered: list[nn.Module],
        before: dict[int, str],
    ) -> None:
        super().__init__()
        self._network, self._owners, self._before = network, owners, before
        self._running, self._entered = running, entered

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _DERIVATIVES:  # perhaps of everything that was computed before
            for module in self._entered:
                setattr(module, _OPEN, True)
        leaves = [id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, nn.Parameter)]
        if leaves and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
            for leaf in leaves:
                if leaf in self._before:
                    setattr(self._network, _ELSEWHERE, self._before[leaf])
                for owner in self._owners.get(leaf, ()):
                    if not any(owner is one for one in self._running):
                        setattr(owner, _OPEN, True)
        return result


@contextlib.contextmanager
def _exchanged(network: nn.Module) -> Iterator[None]:
    """Replace the parameters of modules in the block by others with equal values, as FSDP does."""
    others: dict[nn.Parameter, nn.Parameter] = {}
    for _, parameter in network.named_parameters():
        if type(parameter) is nn.Parameter:
            others[parameter] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    _replace(network, others)
    try:
        yield
    finally:
        _replace(network, {other: parameter for parameter, other in others.items()})


def _pythons(network: nn.Module) -> list[nn.Module]:
    """Return the modules that are no scripts."""
    return [module for module in network.modules() if not isinstance(module, torch.jit.ScriptModule)]


def _replace(network: nn.Module, others: dict[nn.Parameter, nn.Parameter]) -> None:
    for module in _pythons(network):
        for name, parameter in list(module._parameters.items()):
            if parameter is None or parameter not in others:
                continue
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = others[parameter]
            else:  # recurrent layers keep a list of their weights in step
                setattr(module, name, others[parameter])
