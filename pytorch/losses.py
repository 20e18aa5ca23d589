"""Losses by name, and the logits among a network's outputs; `tensorflow/losses.py` has the same losses.

Each takes outputs and targets, (n, ...), and returns the sum over the n samples of the mean over all other axes.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from allstep.common.base.errors import UserError
from allstep.common.catalog import user_file
from allstep.common.catalog.losses import wrong_loss
from allstep.common.catalog.network_outputs import logits_of
from allstep.common.catalog.user_file import name_of

Measure = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes outputs and targets, and returns a sum over the samples."""


def build_loss(name: str, label_smoothing: float = 0.0, class_weights: torch.Tensor | None = None) -> Measure:
    """Return a loss of `common.catalog.losses.LOSSES`, or the user's function that FILE.py:FUNCTION names.

    `class_weights`, float32 (classes,), are factors of the terms of the cross-entropy, which stays a mean over samples.
    """
    if (function := user_file.loss_for("pytorch", name)) is not None:
        _check_object(function)
        return partial(_users, function)
    if name == "cross-entropy":
        options = {"label_smoothing": label_smoothing, "weight": class_weights, "reduction": "sum"}
        return partial(_cross_entropy, partial(functional.cross_entropy, **options))
    return partial(_sum_over_samples, _LOSSES[name])


def measure_of(name: str) -> Callable[[np.ndarray, np.ndarray], float]:
    """Return a function of arrays: a user's loss of outputs and targets, times the number of samples."""
    loss, device = build_loss(name), torch.empty(0).device

    @torch.no_grad()
    def measure(outputs: np.ndarray, targets: np.ndarray) -> float:
        return float(loss(*(torch.tensor(one, device=device) for one in (outputs, targets))))

    return measure


def scores(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return what metrics need of outputs (..., classes), float32 (..., 3): see `common.training.metrics.Scores`."""
    outputs, targets = outputs.float(), targets.unsqueeze(-1)
    own = outputs.gather(-1, targets)
    before = torch.arange(outputs.shape[-1], device=outputs.device) < targets
    rank = ((outputs > own) | ((outputs == own) & before)).sum(-1)
    return torch.stack([outputs.argmax(-1), rank, own.squeeze(-1) - outputs.logsumexp(-1)], -1)


def _cross_entropy(add_up: Measure, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of logits (n, ..., classes) and classes (n, ...), or probabilities (n, classes)."""
    if targets.is_floating_point():
        return add_up(outputs.float(), targets)
    loss_sum = add_up(outputs.float().flatten(0, -2), targets.flatten())
    return loss_sum if targets.dim() == 1 else loss_sum / targets[0].numel()


def _users(function: Measure, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of a user's function, which returns the mean over all samples or the loss of each sample."""
    losses = user_file.call_often(function, outputs.float(), targets, flag="--loss")
    if not isinstance(losses, torch.Tensor) or losses.shape[:1] not in ((), targets.shape[:1]):
        raise wrong_loss(function, getattr(losses, "shape", losses))
    if not losses.is_floating_point():
        raise wrong_loss(function, losses.dtype)
    return losses.mean() * len(targets)


def _check_object(function: Callable) -> None:
    """Move a loss that is a module to the default device. Raises UserError if it has parameters of its own."""
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, nn.Module):
        function.to(torch.empty(0).device)
        if any(parameter.requires_grad for parameter in function.parameters()):
            raise UserError(
                f"{name_of(function)} of --loss has parameters, which the optimizer does not get; move them to the "
                "network"
            )


def _sum_over_samples(measure: Measure, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return measure(outputs.float(), targets).sum() / math.prod(targets.shape[1:])


def _mae(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).abs()


_LOSSES: dict[str, Measure] = {
    "mse": partial(functional.mse_loss, reduction="none"),
    "mae": _mae,
    "huber": partial(functional.huber_loss, reduction="none"),
    "bce": partial(functional.binary_cross_entropy_with_logits, reduction="none"),
}


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
    """Make `network` return only its logits, (n, *shape), if it returns more."""
    if not isinstance(network, torch.jit.ScriptModule):  # a script takes no hooks
        network.register_forward_hook(lambda _module, _inputs, outputs: _reduced(outputs, shape))


def with_heads(loss: Measure) -> Measure:
    """Return `loss` plus, for outputs with auxiliary heads, their losses with the weights of the papers."""

    def loss_of_all(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        if not isinstance(outputs, WithHeads):
            return loss(outputs, targets)
        heads = [outputs.weight * loss(head, targets) for head in outputs.heads]
        return sum(heads, loss(outputs.logits, targets))

    return loss_of_all


def _reduced(outputs: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(outputs, WithHeads):
        return outputs
    if type(outputs).__name__ in _HEADS:
        weight, names = _HEADS[type(outputs).__name__]
        heads = tuple(head for name in names if (head := getattr(outputs, name)) is not None)
        return WithHeads(outputs.logits, heads, weight) if heads else outputs.logits
    return logits_of(outputs, shape)
