"""The losses and metrics by name; `tensorflow/losses.py` has the same ones.

Each takes outputs and targets, (n, ...), and returns a sum over the n samples of what is a mean over the other axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from allstep.common.catalog import user_file
from allstep.common.catalog.losses import wrong_loss

Measure = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def build_loss(name: str, label_smoothing: float = 0.0) -> Measure:
    """A loss of `common.catalog.losses.LOSSES`, or the function of the user's that FILE.py:FUNCTION names."""
    if file := user_file.parse(name):
        return partial(_users, user_file.import_for("pytorch", *file, "--loss"))
    if name == "cross-entropy":
        return partial(_cross_entropy, label_smoothing=label_smoothing)
    return partial(_sum_over_samples, _LOSSES[name])


def build_metric(name: str, loss: str) -> Measure:
    """A metric of `common.catalog.losses.metric_of`."""
    measured = _mae if name == "mae" else _has_right_sign if loss == "bce" else _is_right_class
    return partial(_sum_over_samples, measured)


def _cross_entropy(outputs: torch.Tensor, targets: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """Of logits (n, ..., classes) and classes (n, ...), or shares of the classes (n, classes)."""
    if targets.is_floating_point():
        return functional.cross_entropy(outputs.float(), targets, reduction="sum", label_smoothing=label_smoothing)
    logits, classes = outputs.float().flatten(0, -2), targets.flatten()
    loss_sum = functional.cross_entropy(logits, classes, reduction="sum", label_smoothing=label_smoothing)
    return loss_sum if targets.dim() == 1 else loss_sum / targets[0].numel()


def _users(function: Measure, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of a function that returns the mean over all samples, or the losses of each sample."""
    losses = user_file.call(function, outputs.float(), targets, flag="--loss")
    if not isinstance(losses, torch.Tensor) or losses.shape[:1] not in ((), targets.shape[:1]):
        raise wrong_loss(function, getattr(losses, "shape", losses))
    return losses.mean() * len(targets)


def _sum_over_samples(measure: Measure, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return measure(outputs.float(), targets).sum() / math.prod(targets.shape[1:])


def _is_right_class(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(-1) == targets).float()


def _has_right_sign(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs > 0) == (targets > 0.5)).float()


def _mae(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).abs()


_LOSSES: dict[str, Measure] = {
    "mse": partial(functional.mse_loss, reduction="none"),
    "mae": _mae,
    "huber": partial(functional.huber_loss, reduction="none"),
    "bce": partial(functional.binary_cross_entropy_with_logits, reduction="none"),
}
