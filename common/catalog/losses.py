"""Names of training losses, and the validation metric of each task."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from allstep.common.base.errors import UserError
from allstep.common.base.flag_types import one_of
from allstep.common.catalog import user_file
from allstep.common.catalog.user_file import name_of

if TYPE_CHECKING:
    from allstep.common.config.train_config import TrainConfig
    from allstep.common.data.datasets import Task

LOSSES: dict[str, tuple[Task, ...]] = {
    "cross-entropy": ("classification", "next-token"),
    "mse": ("regression",),
    "mae": ("regression",),
    "huber": ("regression",),
    "bce": ("regression",),
}
"""Tasks of each loss by its name in `--loss`; the first loss of a task is its default."""


def loss_name(word: str) -> str:
    """Parse `--loss`: one of LOSSES or FILE.py:FUNCTION."""
    return word if user_file.parse(word) or word == user_file.PROGRAM else one_of(*LOSSES, "FILE.py:FUNCTION")(word)


def default_loss(task: Task) -> str:
    """Return the default loss of a task."""
    return next(name for name, tasks in LOSSES.items() if task in tasks)


def metric_of(task: Task, loss: str | None = None) -> str:
    """Return the validation metric, a mean over samples: `accuracy`, or `mae` if there are no classes.

    With `bce`, the targets are 0 or 1, and the accuracy is the share of outputs with the right sign.
    """
    return "mae" if task == "regression" and loss != "bce" else "accuracy"


def check_loss(config: TrainConfig, task: Task) -> None:
    """Refuse a loss that does not fit the targets of the data set; the message names those that do."""
    dataset, loss = config.data.dataset, config.loss or default_loss(task)
    names = [name for name, tasks in LOSSES.items() if task in tasks]
    if config.loss in LOSSES and config.loss not in names:
        raise UserError(
            f"expected --loss {' or '.join(names)} for the targets of {dataset}, received {config.loss}; name another, "
            "or give --task if targets in your own data are something else"
        )
    if config.optimizer.class_weights and loss != "cross-entropy":
        raise UserError(f"--class-weights needs --loss cross-entropy, received {loss}")
    if config.optimizer.label_smoothing and loss != "cross-entropy":
        raise UserError(
            f"expected --label-smoothing with classes to spread a label over, received the targets of {dataset}, which "
            "has none; leave it out"
        )


def wrong_loss(function: Callable, received: object) -> UserError:
    """Return the error for a user's loss that returns neither the mean loss nor a loss per sample."""
    return UserError(
        f"expected {name_of(function)}() of --loss to return the mean loss, or a loss of each sample, received "
        f"{received}; return one of them"
    )
