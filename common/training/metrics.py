"""Validation metrics from counts and sums that add up over batches, slices and ranks: the same on any number of ranks.

Integers are added exactly, sums in float64. Averages follow scikit-learn: means over classes count those that occur
among targets or predictions, and means over several outputs weight them equally.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from allstep.common.base.collectives import Collectives
from allstep.common.base.errors import UserError
from allstep.common.catalog import user_file
from allstep.common.catalog.losses import metric_of
from allstep.common.catalog.metrics import LOSS, entry_of, field_of, metrics_of, top_k
from allstep.common.config.train_config import TrainConfig
from allstep.common.data.datasets import Dataset

Counts = Mapping[str, np.ndarray]
Update = Callable[[np.ndarray, np.ndarray], Mapping[str, Any]]


@dataclass(frozen=True)
class Metric:
    """A metric: what is counted of outputs and targets, and what the sums of these counts come to."""

    name: str
    counter: str
    """Name of what is counted, which several metrics may share."""
    update: Update
    """Function from outputs (n, ...) and targets (n, ...) to counts."""
    compute: Callable[[Any], Any]
    """Function from the counts of all samples to a number, or a list of them."""
    lower_is_better: bool = False


class Metrics:
    """The metrics of a run."""

    def __init__(self, names: Sequence[str], dataset: Dataset, best_by: str) -> None:
        """Build them.

        Args:
            names: see `common.catalog.metrics.metrics_of`; the first one is in the epoch line.
            best_by: metric, or loss, by which checkpoints are compared.

        Raises:
            UserError: one is in a user's file that cannot be imported or has none.
        """
        self.metrics = tuple(_metric(name, dataset) for name in names)
        self._best_by = best_by

    def score(self, loss: float, values: Mapping[str, Any]) -> float | None:
        """Return what is higher for the better checkpoint; None if it is not finite.

        Raises:
            UserError: the metric of --best-by is not a number.
        """
        if self._best_by == LOSS:
            return -loss
        metric = next(one for one in self.metrics if one.name == self._best_by)
        value = values[field_of(metric.name)]
        if value is not None and not isinstance(value, (int, float)):
            raise UserError(f"--best-by {metric.name} needs a metric that is one number, not a list")
        return -value if value is not None and metric.lower_is_better else value

    def tally(self, num_rows: int) -> Tally:
        """Return counts of no samples; each row's sums are added up by itself, so that their order is fixed."""
        return Tally(self, num_rows)

    def compute(self, totals: Mapping[str, Counts]) -> dict[str, Any]:
        """Return the value of each metric by its field's name; None for a number that is not finite."""
        return {field_of(one.name): _plain(one.compute(totals[one.counter])) for one in self.metrics}


def build_metrics(config: TrainConfig, dataset: Dataset) -> Metrics:
    """Return the metrics of a run.

    Raises:
        UserError: a metric does not fit the targets, or see `Metrics`.
    """
    best_by = config.output.best_by or metric_of(dataset.task, config.loss)
    return Metrics(metrics_of(config, dataset), dataset, best_by)


@dataclass
class Tally:
    """Counts of the samples that this rank has evaluated so far."""

    metrics: Metrics
    num_rows: int
    _whole: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)
    _sums: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)

    def add(self, row: int, outputs: np.ndarray, targets: np.ndarray, *, counts: bool = True) -> None:
        """Add the counts of some samples; those of padding, with `counts` off, only tell what there is to count."""
        for counter, update in {one.counter: one.update for one in self.metrics.metrics}.items():
            for name, value in update(outputs, targets).items():
                array = np.asarray(value)
                key = counter, name
                if array.dtype.kind in "biu":
                    kept = self._whole.setdefault(key, np.zeros(array.shape, np.int64))
                elif array.dtype.kind == "f":
                    rows = self._sums.setdefault(key, np.zeros((self.num_rows, *array.shape)))
                    kept = rows[row, ...]
                else:
                    raise UserError(
                        f"update() of --metrics {counter} returns {array.dtype}; return whole numbers or floats"
                    )
                if kept.shape != array.shape:
                    raise UserError(
                        f"update() of --metrics {counter} returns counts of shape {array.shape} after {kept.shape}; "
                        "return one shape for all batches"
                    )
                if counts:
                    kept += array

    def totals(self, collectives: Collectives) -> dict[str, dict[str, np.ndarray]]:
        """Return the counts of all ranks; all of them call it."""
        arrays = [*self._whole.items(), *self._sums.items()]
        local = np.concatenate([array.ravel().astype(np.float64) for _, array in arrays])
        ends = np.cumsum([array.size for _, array in arrays])
        totals: dict[str, dict[str, np.ndarray]] = {}
        for (key, array), values in zip(arrays, np.split(collectives.all_reduce_sum(local), ends[:-1]), strict=True):
            total = values.reshape(array.shape)
            total = total.astype(np.int64) if key in self._whole else total.sum(axis=0)
            totals.setdefault(key[0], {})[key[1]] = total
        return totals


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Return the softmax over the last axis, float64."""
    powers = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def best_classes(logits: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the most probable classes of logits (n, classes), best first, and their probabilities: (n, number)."""
    best = np.argsort(-logits, axis=1, kind="stable")[:, :number]
    return best, np.take_along_axis(probabilities(logits), best, axis=1)


def _metric(name: str, dataset: Dataset) -> Metric:
    if file := user_file.parse(name):
        return _users(name, file)
    if dataset.task == "regression" and name == "accuracy":
        return Metric(name, "signs", _signs, lambda counts: counts["right"] / counts["all"])
    if number := top_k(name):
        return Metric(name, name, partial(_top, number), lambda counts: counts["right"] / counts["all"])
    counter, update, compute = _BUILT_IN[name]
    if counter in ("classes", "confusion"):
        update = partial(update, dataset.num_classes)
    if name == "r2":  # squares of numbers far from 0 would cancel
        counter, update = "centred", partial(_errors, centre=_first_target(dataset))
    return Metric(name, counter, update, compute, entry_of(name).lower_is_better)


def _users(name: str, file: tuple[Any, str]) -> Metric:
    """Return the metric that an object, or a class without arguments, in a user's file is."""
    found = user_file.find(*file, "--metrics")
    if isinstance(found, type):
        found = user_file.call(found, flag="--metrics")
    if not all(callable(getattr(found, method, None)) for method in ("update", "compute")):
        received = "nothing" if found is None else type(found).__name__
        raise UserError(f"--metrics {name} needs update(outputs, targets) and compute(counts), received {received}")
    has_names: list[bool] = []

    def update(outputs: np.ndarray, targets: np.ndarray) -> Mapping[str, Any]:
        counts = user_file.call_often(found.update, outputs, targets, flag="--metrics")
        has_names[:] = [isinstance(counts, Mapping)]
        return counts if has_names[0] else {"": counts}

    def compute(counts: Counts) -> Any:
        return user_file.call(found.compute, counts if has_names[0] else counts[""], flag="--metrics")

    return Metric(name, name, update, compute, bool(getattr(found, "lower_is_better", False)))


def _plain(value: Any) -> Any:
    """Return a metric's value as JSON has it."""
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(item) for item in value]
    if isinstance(value, (bool, np.bool_, int, np.integer)):
        return int(value)
    if not isinstance(value, (float, np.floating)):
        raise UserError(f"compute() of a metric returns {type(value).__name__}; return a number or a list of numbers")
    return float(value) if math.isfinite(value) else None


# What is counted.


def _flat(outputs: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return outputs (n, classes) and classes (n,): of a sample, or of each token of a text."""
    return outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1)


def _classes(num_classes: int, outputs: np.ndarray, targets: np.ndarray) -> Counts:
    outputs, targets = _flat(outputs, targets)
    predicted = outputs.argmax(1)
    found = {"right": targets[predicted == targets], "predicted": predicted, "actual": targets}
    return {name: np.bincount(values, minlength=num_classes) for name, values in found.items()}


def _confusion(num_classes: int, outputs: np.ndarray, targets: np.ndarray) -> Counts:
    outputs, targets = _flat(outputs, targets)
    pairs = np.bincount(targets * num_classes + outputs.argmax(1), minlength=num_classes**2)
    return {"pairs": pairs.reshape(num_classes, num_classes)}


def _top(number: int, outputs: np.ndarray, targets: np.ndarray) -> Mapping[str, Any]:
    """Count targets among the `number` largest outputs; of equal outputs, the first classes are taken."""
    outputs, targets = _flat(outputs, targets)
    own = outputs[np.arange(len(targets)), targets][:, np.newaxis]
    before = np.arange(outputs.shape[1]) < targets[:, np.newaxis]
    rank = np.count_nonzero((outputs > own) | ((outputs == own) & before), axis=1)
    return {"right": np.count_nonzero(rank < number), "all": len(targets)}


def _signs(outputs: np.ndarray, targets: np.ndarray) -> Mapping[str, Any]:
    return {"right": np.count_nonzero((outputs > 0) == (targets > 0.5)), "all": targets.size}


def _errors(outputs: np.ndarray, targets: np.ndarray, centre: float | np.ndarray = 0.0) -> Mapping[str, Any]:
    errors = outputs.astype(np.float64) - targets
    counts = {"all": len(targets), "absolute": np.abs(errors).sum(0), "squares": np.square(errors).sum(0)}
    centred = targets.astype(np.float64) - centre
    return {**counts, "sum": centred.sum(0), "sum_of_squares": np.square(centred).sum(0)}


def _surprise(outputs: np.ndarray, targets: np.ndarray) -> Mapping[str, Any]:
    """Sum up the negative logarithms of the targets' probabilities."""
    outputs, targets = _flat(outputs, targets)
    highest = outputs.max(1, keepdims=True)
    logs = np.log(np.exp(outputs - highest).sum(1, dtype=np.float64)) + highest[:, 0]
    return {"sum": (logs - outputs[np.arange(len(targets)), targets]).sum(), "all": len(targets)}


def _first_target(dataset: Dataset) -> np.ndarray:
    return dataset.validation.read(np.zeros(1, np.int64), epoch=0)[1][0].astype(np.float64)


# What counts come to.


def _over(one: Any, other: Any) -> np.ndarray:
    """Return `one` / `other`, and 0 where `other` is 0."""
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return np.divide(one, other, out=np.zeros(np.broadcast(one, other).shape), where=other != 0)


def _precision(counts: Counts) -> np.ndarray:
    return _over(counts["right"], counts["predicted"])


def _recall(counts: Counts) -> np.ndarray:
    return _over(counts["right"], counts["actual"])


def _f1(counts: Counts) -> np.ndarray:
    return _over(2 * counts["right"], counts["predicted"] + counts["actual"])


def _macro(of_classes: Callable[[Counts], np.ndarray], counts: Counts) -> float:
    return of_classes(counts)[counts["predicted"] + counts["actual"] > 0].mean()


def _weighted(of_classes: Callable[[Counts], np.ndarray], counts: Counts) -> float:
    return float(_over(of_classes(counts) @ counts["actual"], counts["actual"].sum()))


def _r2(counts: Counts) -> float:
    """Return the mean over outputs; of targets that are all the same, 1 if there is no error and else 0."""
    total = counts["sum_of_squares"] - np.square(counts["sum"]) / counts["all"]
    exact = np.where(counts["squares"] == 0, 1.0, 0.0)
    return float(np.where(total > 0, 1 - _over(counts["squares"], total), exact).mean())


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


_OF_CLASSES = {"precision": _precision, "recall": _recall, "f1": _f1}
_BUILT_IN: dict[str, tuple[str, Any, Callable[[Any], Any]]] = {
    "accuracy": ("classes", _classes, lambda counts: counts["right"].sum() / counts["actual"].sum()),
    "balanced-accuracy": ("classes", _classes, lambda counts: _recall(counts)[counts["actual"] > 0].mean()),
    **{name: ("classes", _classes, partial(_macro, each)) for name, each in _OF_CLASSES.items()},
    **{f"{name}-weighted": ("classes", _classes, partial(_weighted, each)) for name, each in _OF_CLASSES.items()},
    **{f"{name}-per-class": ("classes", _classes, each) for name, each in _OF_CLASSES.items()},
    "confusion-matrix": ("confusion", _confusion, lambda counts: counts["pairs"]),
    "perplexity": ("surprise", _surprise, lambda counts: _exp(float(counts["sum"] / counts["all"]))),
    "mae": ("errors", _errors, lambda counts: (counts["absolute"] / counts["all"]).mean()),
    "rmse": ("errors", _errors, lambda counts: np.sqrt(counts["squares"] / counts["all"]).mean()),
    "r2": ("errors", _errors, _r2),
}
