"""Counts of outputs and targets, and the values of validation metrics that follow from the sums of these counts.

Averages follow scikit-learn: means over classes count those that occur among targets or predictions, and means over
several outputs weight them equally.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

Counts = Mapping[str, np.ndarray]


class Scores:
    """Numbers of each sample or token that metrics of classes need, from `scores` in losses.py on the device."""

    def __init__(self, columns: np.ndarray) -> None:
        """`columns` are float32 (..., 3), in the order of the properties of `_Outputs`."""
        predicted, rank, self.log_probability = columns.reshape(-1, 3).T
        self.predicted, self.rank = predicted.astype(np.int64), rank.astype(np.int64)


class _Outputs:
    """The same numbers as `Scores`, of outputs (n, classes) for targets (n,), each computed when it is needed."""

    def __init__(self, outputs: np.ndarray, targets: np.ndarray) -> None:
        self._outputs, self._targets = outputs.reshape(-1, outputs.shape[-1]), targets
        self._own = self._outputs[np.arange(len(targets)), targets][:, np.newaxis]

    @property
    def predicted(self) -> np.ndarray:
        """Class of the largest output."""
        return self._outputs.argmax(1)

    @property
    def rank(self) -> np.ndarray:
        """Number of classes ranked before the target; classes with equal outputs are ranked by number."""
        outputs, own = self._outputs, self._own
        before = np.arange(outputs.shape[1]) < self._targets[:, np.newaxis]
        return np.count_nonzero((outputs > own) | ((outputs == own) & before), axis=1)

    @property
    def log_probability(self) -> np.ndarray:
        """Logarithm of the target's probability."""
        highest = self._outputs.max(1, keepdims=True)
        logs = np.log(np.exp(self._outputs - highest).sum(1, dtype=np.float64)) + highest[:, 0]
        return self._own[:, 0] - logs


Classes = Callable[[Scores | _Outputs, np.ndarray], Mapping[str, Any]]


def of_classes(update: Classes, outputs: np.ndarray | Scores, targets: np.ndarray) -> Mapping[str, Any]:
    """Count classes of samples, or of each token of a text."""
    targets = targets.reshape(-1)
    return update(outputs if isinstance(outputs, Scores) else _Outputs(outputs, targets), targets)


def _classes(num_classes: int, scores: Scores | _Outputs, targets: np.ndarray) -> Counts:
    predicted = scores.predicted
    found = {"right": targets[predicted == targets], "predicted": predicted, "actual": targets}
    return {name: np.bincount(values, minlength=num_classes) for name, values in found.items()}


def _confusion(num_classes: int, scores: Scores | _Outputs, targets: np.ndarray) -> Counts:
    known = scores.predicted < num_classes  # the data set may lack classes that the network predicts
    pairs = np.bincount((targets * num_classes + scores.predicted)[known], minlength=num_classes**2)
    return {"pairs": pairs.reshape(num_classes, num_classes)}


def top(number: int, scores: Scores | _Outputs, targets: np.ndarray) -> Mapping[str, Any]:
    return {"right": np.count_nonzero(scores.rank < number), "all": len(targets)}


def _surprise(scores: Scores | _Outputs, targets: np.ndarray) -> Mapping[str, Any]:
    """Sum up the negative logarithms of the targets' probabilities."""
    return {"sum": -scores.log_probability.sum(dtype=np.float64), "all": len(targets)}


def signs(outputs: np.ndarray, targets: np.ndarray) -> Mapping[str, Any]:
    return {"right": np.count_nonzero((outputs > 0) == (targets > 0.5)), "all": targets.size}


def errors(outputs: np.ndarray, targets: np.ndarray, centre: float | np.ndarray = 0.0) -> Mapping[str, Any]:
    errors = outputs.astype(np.float64) - targets
    counts = {"all": len(targets), "absolute": np.abs(errors).sum(0), "squares": np.square(errors).sum(0)}
    centred = targets.astype(np.float64) - centre
    return {**counts, "sum": centred.sum(0), "sum_of_squares": np.square(centred).sum(0)}


# Values of metrics, from the sums of counts.


def _over(one: Any, other: Any) -> np.ndarray:
    """Return `one` / `other`, and 0 where `other` is 0."""
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return np.divide(one, other, out=np.zeros(np.broadcast(one, other).shape), where=other != 0)


def _recall(counts: Counts) -> np.ndarray:
    return _over(counts["right"], counts["actual"])


def _macro(of_classes: Callable[[Counts], np.ndarray], counts: Counts) -> float:
    return of_classes(counts)[counts["predicted"] + counts["actual"] > 0].mean()


def _weighted(of_classes: Callable[[Counts], np.ndarray], counts: Counts) -> float:
    return float(_over(of_classes(counts) @ counts["actual"], counts["actual"].sum()))


def _r2(counts: Counts) -> float:
    """Return the mean R2 of the outputs; where all targets are the same, R2 is 1 without errors and else 0."""
    total = counts["sum_of_squares"] - np.square(counts["sum"]) / counts["all"]
    exact = np.where(counts["squares"] == 0, 1.0, 0.0)
    return float(np.where(total > 0, 1 - _over(counts["squares"], total), exact).mean())


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


_OF_CLASSES: dict[str, Callable[[Counts], np.ndarray]] = {
    "precision": lambda counts: _over(counts["right"], counts["predicted"]),
    "recall": _recall,
    "f1": lambda counts: _over(2 * counts["right"], counts["predicted"] + counts["actual"]),
}
BUILT_IN: dict[str, tuple[str, Any, Callable[[Any], Any]]] = {
    "accuracy": ("classes", _classes, lambda counts: counts["right"].sum() / counts["actual"].sum()),
    "balanced-accuracy": ("classes", _classes, lambda counts: _recall(counts)[counts["actual"] > 0].mean()),
    **{name: ("classes", _classes, partial(_macro, each)) for name, each in _OF_CLASSES.items()},
    **{f"{name}-weighted": ("classes", _classes, partial(_weighted, each)) for name, each in _OF_CLASSES.items()},
    **{f"{name}-per-class": ("classes", _classes, each) for name, each in _OF_CLASSES.items()},
    "confusion-matrix": ("confusion", _confusion, lambda counts: counts["pairs"]),
    "perplexity": ("surprise", _surprise, lambda counts: _exp(float(counts["sum"] / counts["all"]))),
    "mae": ("errors", errors, lambda counts: (counts["absolute"] / counts["all"]).mean()),
    "rmse": ("errors", errors, lambda counts: np.sqrt(counts["squares"] / counts["all"]).mean()),
    "r2": ("errors", errors, _r2),
}
