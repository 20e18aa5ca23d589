"""Find the logits in what networks return; auxiliary heads have the weights of their papers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

Measure = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_HEADS = {
    "GoogLeNetOutputs": (0.3, ("aux_logits2", "aux_logits1")),
    "InceptionOutputs": (0.4, ("aux_logits",)),
}
"""Weight and names of the auxiliary logits, by torchvision's (0.29) type of outputs."""


class WithHeads(NamedTuple):
    """Logits of a network in training and those of its auxiliary heads."""

    logits: torch.Tensor
    heads: tuple[torch.Tensor, ...]
    weight: float


def return_logits(network: nn.Module, shape: tuple[int, ...]) -> None:
    """Have `network` return its logits, (n, `shape`), where it returns them among others."""
    if not isinstance(network, torch.jit.ScriptModule):  # which takes no hooks
        network.register_forward_hook(lambda _module, _inputs, outputs: _reduced(outputs, shape))


def with_heads(loss: Measure) -> Measure:
    """Return `loss` plus, for outputs with auxiliary heads, the weighted losses of these."""

    def loss_of_all(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        if not isinstance(outputs, WithHeads):
            return loss(outputs, targets)
        heads = [outputs.weight * loss(head, targets) for head in outputs.heads]
        return sum(heads, loss(outputs.logits, targets))

    return loss_of_all


def _reduced(outputs: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(outputs, (torch.Tensor, WithHeads)):
        return outputs
    if type(outputs).__name__ in _HEADS:
        weight, names = _HEADS[type(outputs).__name__]
        heads = tuple(head for name in names if (head := getattr(outputs, name)) is not None)
        return WithHeads(outputs.logits, heads, weight) if heads else outputs.logits
    named = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if isinstance(named, torch.Tensor):
        return named
    values = outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, (tuple, list)) else ()
    fitting = [one for one in values if isinstance(one, torch.Tensor) and one.shape[1:] == shape]
    return fitting[0] if len(fitting) == 1 else outputs  # which of several are the logits is not known
