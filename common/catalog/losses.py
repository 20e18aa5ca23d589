"""Names of training losses and validation metrics, the tasks that they are for, and which of two values is better."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allstep.common.base.errors import UserError
from allstep.common.base.flag_types import one_of
from allstep.common.catalog import user_file
from allstep.common.catalog.user_file import name_of

if TYPE_CHECKING:
    from allstep.common.config.train_config import TrainConfig
    from allstep.common.data.datasets import Dataset, Task


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


_CLASSES: tuple[Task, ...] = ("classification", "next-token")
MAX_CONFUSED = 2000
"""Maximum number of classes of a confusion matrix: its numbers travel between ranks after each epoch."""
LOSS = "loss"
"""Value of --best-by that stands for the validation loss."""


@dataclass(frozen=True)
class MetricEntry:
    """Properties of a metric that its name tells."""

    tasks: tuple[Task, ...] = _CLASSES
    lower_is_better: bool = False
    is_number: bool = True
    """Whether it is one number, so that checkpoints can be compared by it."""


METRICS = {
    "accuracy": MetricEntry(),
    "top-5": MetricEntry(),
    "balanced-accuracy": MetricEntry(),
    **{
        f"{name}{suffix}": MetricEntry(is_number=not suffix.endswith("class"))
        for name in ("precision", "recall", "f1")
        for suffix in ("", "-weighted", "-per-class")
    },
    "confusion-matrix": MetricEntry(is_number=False),
    "perplexity": MetricEntry(lower_is_better=True),
    "mae": MetricEntry(("regression",), lower_is_better=True),
    "rmse": MetricEntry(("regression",), lower_is_better=True),
    "r2": MetricEntry(("regression",)),
}
"""Metrics by their names in `--metrics`; precision, recall and f1 alone are means over the classes (macro)."""


def metric_name(word: str) -> str:
    """Parse a word of `--metrics`: one of METRICS, top-K or FILE.py:NAME."""
    return word if top_k(word) or user_file.parse(word) else one_of(*METRICS, "top-K", "FILE.py:NAME")(word)


def best_name(word: str) -> str:
    """Parse `--best-by`: the loss or a metric that is one number."""
    if word == LOSS:
        return word
    numbers = [name for name, entry in METRICS.items() if entry.is_number]
    return metric_name(word) if word not in METRICS else one_of(LOSS, *numbers)(word)


def top_k(word: str) -> int | None:
    """Return K of top-K, or None."""
    match = re.fullmatch(r"top-([1-9]\d{0,5})", word, re.ASCII)
    return int(match[1]) if match else None


def entry_of(word: str) -> MetricEntry:
    """Return the properties of a metric; one of a user fits every task."""
    if user_file.parse(word):
        return MetricEntry((*_CLASSES, "regression"))
    return METRICS.get(word, MetricEntry())


def field_of(word: str) -> str:
    """Return the name of a metric in events, after `validation_`."""
    file = user_file.parse(word)
    return file[1] if file else word.replace("-", "_")


def metrics_of(config: TrainConfig, dataset: Dataset) -> tuple[str, ...]:
    """Return the metrics of a run: those of --metrics, then that of the task and that of --best-by if not among them.

    Raises UserError if a metric does not fit the targets.
    """
    default, best = metric_of(dataset.task, config.loss), config.output.best_by
    named = [*config.output.metrics, default, *([best] if best not in (None, LOSS) else [])]
    names = tuple(dict.fromkeys(named))
    _check(names, default, dataset, config.data.dataset)
    return names


def are_of_scores(config: TrainConfig, dataset: Dataset) -> bool:
    """Return whether the metrics need only three numbers for each token instead of all outputs (see `Scores`).

    With a large vocabulary, copying all outputs from a GPU would take longer than computing them.
    """
    return dataset.task == "next-token" and not any(map(user_file.parse, metrics_of(config, dataset)))


def _check(names: Sequence[str], default: str, dataset: Dataset, where: str) -> None:
    if len({field_of(name) for name in names}) < len(names):
        raise UserError(f"--metrics has two metrics of one name in {' '.join(names)}; rename one")
    are_labels = dataset.task == "regression" and default == "accuracy"
    for name in names:
        if are_labels and name != default and not user_file.parse(name):
            raise UserError(f"--metrics {name} does not fit --loss bce; give accuracy or FILE.py:NAME")
        if dataset.task not in entry_of(name).tasks and name != default:
            fitting = [other for other, entry in METRICS.items() if dataset.task in entry.tasks]
            raise UserError(
                f"--metrics {name} does not fit the targets of {where}, which are for {dataset.task}; name one of "
                f"{', '.join(fitting)}"
            )
        if (number := top_k(name)) and number > dataset.num_classes:
            raise UserError(f"--metrics {name} needs {number} classes at least, {where} has {dataset.num_classes}")
        if name == "confusion-matrix" and dataset.num_classes > MAX_CONFUSED:
            raise UserError(f"--metrics {name} takes at most {MAX_CONFUSED} classes, {where} has {dataset.num_classes}")
