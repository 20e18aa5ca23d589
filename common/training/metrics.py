"""Validation, and its metrics, from counts and sums that add up over batches, slices and ranks.

Both are the same on any number of ranks: integers are added exactly, sums in float64. `counted.py` has what is counted,
and what the sums come to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import xxhash

from allstep.common.base.collectives import Collectives
from allstep.common.base.errors import UserError
from allstep.common.catalog import user_file
from allstep.common.catalog.losses import LOSS, are_of_scores, entry_of, field_of, metric_of, metrics_of, top_k
from allstep.common.config.train_config import TrainConfig
from allstep.common.data.datasets import Dataset
from allstep.common.data.datasets.base import Split
from allstep.common.data.loader import Batch, validation_batches
from allstep.common.training.counted import BUILT_IN, Counts, Scores, errors, of_classes, signs, top
from allstep.common.training.user_metric import UserMetric, as_number
from allstep.common.training.worker import Worker
from allstep.common.watch import ProgressState

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

    def __init__(self, names: Sequence[str], dataset: Dataset, best_by: str, *, of_scores: bool = False) -> None:
        """Build them. Raises UserError if one is in a user's file that cannot be imported or has none.

        Args:
            of_scores: whether outputs come as `Scores`; see `common.catalog.losses.are_of_scores`.
            names: see `common.catalog.losses.metrics_of`; the first one is in the epoch line.
            best_by: metric, or loss, by which checkpoints are compared.
        """
        self.metrics: tuple[Metric, ...] = tuple(_metric(name, dataset) for name in names)
        self._best_by, self.of_scores = best_by, of_scores
        self.has_user_metric = any(user_file.parse(name) for name in names)

    def score(self, loss: float, values: Mapping[str, Any]) -> float | None:
        """Return what is higher for the better checkpoint; None if it is not finite.

        Raises UserError if the metric of --best-by is not a number.
        """
        if self._best_by == LOSS:
            return -loss
        metric = next(one for one in self.metrics if one.name == self._best_by)
        value = values[field_of(metric.name)]
        if value is not None and not isinstance(value, (int, float)):
            raise UserError(f"--best-by {metric.name} needs a metric that is one number, not a list")
        return -value if value is not None and metric.lower_is_better else value

    def compute(self, totals: Mapping[str, Counts]) -> dict[str, Any]:
        """Return the value of each metric by its field's name; None for a number that is not finite."""
        return {field_of(one.name): as_number(one.compute(totals[one.counter])) for one in self.metrics}


def build_metrics(config: TrainConfig, dataset: Dataset) -> Metrics:
    """Return the metrics of a run. Raises UserError if one does not fit the targets, and as `Metrics` does."""
    best_by = config.output.best_by or metric_of(dataset.task, config.loss)
    return Metrics(metrics_of(config, dataset), dataset, best_by, of_scores=are_of_scores(config, dataset))


@dataclass
class Tally:
    """Counts of the samples that this rank has evaluated so far; each row's sums are added up separately, in order."""

    metrics: Metrics
    num_rows: int
    _names: dict[str, Collection[str]] = field(default_factory=dict)
    _whole: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)
    _sums: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)

    def add(self, row: int, outputs: np.ndarray, targets: np.ndarray, *, counts: bool = True) -> None:
        """Add the counts of some samples; padding, with `counts` off, only tells the shapes of the counts."""
        given: Any = Scores(outputs) if self.metrics.of_scores else outputs
        for counter, update in {one.counter: one.update for one in self.metrics.metrics}.items():
            counted = update(given, targets)
            if self._names.setdefault(counter, counted.keys()) != counted.keys():
                raise UserError(
                    f"update() of --metrics {counter} returns counts of other names than before; return the same for "
                    "all batches, 0 for what does not occur"
                )
            for name, value in counted.items():
                array = np.asarray(value)
                key = counter, name
                if array.dtype.kind in "biu" and key not in self._sums:
                    kept = self._whole.setdefault(key, np.zeros(array.shape, np.int64))
                elif array.dtype.kind in "biuf" and key not in self._whole:
                    rows = self._sums.setdefault(key, np.zeros((self.num_rows, *array.shape)))
                    kept = rows[row, ...]
                else:
                    raise UserError(
                        f"update() of --metrics {counter} returns {array.dtype}; return whole numbers or floats, the "
                        "same for all batches"
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
        arrays = [item for counts in (self._whole, self._sums) for item in sorted(counts.items(), key=str)]
        if self.metrics.has_user_metric:
            self._check_alike(arrays, collectives)
        local = np.concatenate([array.ravel().astype(np.float64) for _, array in arrays])
        ends = np.cumsum([array.size for _, array in arrays])
        totals: dict[str, dict[str, np.ndarray]] = {}
        for (key, array), values in zip(arrays, np.split(collectives.all_reduce_sum(local), ends[:-1]), strict=True):
            total = values.reshape(array.shape)
            total = total.astype(np.int64) if key in self._whole else total.sum(axis=0)
            totals.setdefault(key[0], {})[key[1]] = total
        return totals

    @staticmethod
    def _check_alike(arrays: Sequence[tuple[tuple[str, str], np.ndarray]], collectives: Collectives) -> None:
        """Raise UserError unless all ranks have counts of the same names, types and shapes."""
        text = repr([(*key, array.dtype, array.shape) for key, array in arrays])
        found = collectives.all_gather(np.array([xxhash.xxh64_intdigest(text.encode()) >> 1], np.int64))
        if (found != found[0]).any():
            raise UserError(
                "update() of a metric returns counts of other names, types or shapes on other ranks; return the same "
                "for all batches, 0 (or 0.0) for what does not occur"
            )


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
        user_metric = UserMetric(name, file)
        user_metric.check(dataset)
        return Metric(name, name, user_metric.update, user_metric.compute, user_metric.lower_is_better)
    if dataset.task == "regression" and name == "accuracy":
        return Metric(name, "signs", signs, lambda counts: counts["right"] / counts["all"])
    if number := top_k(name):
        update = partial(of_classes, partial(top, number))
        return Metric(name, name, update, lambda counts: counts["right"] / counts["all"])
    counter, update, compute = BUILT_IN[name]
    if counter in ("classes", "confusion"):
        update = partial(update, dataset.output_shape[-1] if counter == "classes" else dataset.num_classes)
    if counter != "errors":
        update = partial(of_classes, update)
    if name == "r2":  # squares of numbers far from 0 would cancel
        _, targets = dataset.validation.read(np.zeros(1, np.int64), epoch=0)
        counter, update = "centred", partial(errors, centre=targets[0].astype(np.float64))
    last = (lambda counts: compute(counts)[: dataset.num_classes]) if name.endswith("-per-class") else compute
    return Metric(name, counter, update, last, entry_of(name).lower_is_better)


class Stopped(Exception):
    """Raised when the ranks were asked to stop and have all reached the same point."""


@dataclass(frozen=True)
class Evaluation:
    """Results over all samples of a split, exact and the same on all ranks."""

    loss: float
    metrics: Mapping[str, Any]
    """Values of the metrics by the names of their fields."""
    num_samples: int

    def fields(self, prefix: str = "") -> dict[str, Any]:
        """Return the fields of an event."""
        values = {"loss": self.loss, **self.metrics}
        return {f"{prefix}validation_{name}": value for name, value in values.items()}


def evaluate(
    worker: Worker,
    split: Split,
    global_batch: int,
    progress_state: ProgressState,
    metrics: Metrics,
    *,
    num_slices: int | None = None,
    see: Callable[[Batch, np.ndarray], None] = lambda batch, outputs: None,
) -> Evaluation:
    """Return the mean loss and the metrics; every sample counts once, whatever the number of ranks.

    Raises Stopped if the ranks were asked to stop.

    Args:
        num_slices: with --slices, number of slices that a batch is cut into, each of which is evaluated separately.
        see: called with each part of this rank's that has samples, and its outputs.
    """
    collectives = worker.collectives
    # Each slice has a row to which only one rank adds, so no sum depends on the number of ranks.
    sums, tally = np.zeros((num_slices or 1, 2)), Tally(metrics, num_slices or 1)
    progress_state.enter("validation")
    batches = validation_batches(
        split, global_batch, rank=collectives.rank, world_size=collectives.world_size, num_slices=num_slices
    )
    with worker.evaluating():
        for batch in batches:
            if not progress_state.begin_tick():
                raise Stopped
            for row, part in [(one.number, batch.part(one)) for one in batch.slices] or [(0, batch)]:
                # A rank without samples takes part because it may hold weights that the others need.
                loss_sum, outputs = worker.eval_step(part)
                tally.add(row, outputs, part.targets, counts=part.num_samples > 0)
                if part.num_samples:
                    sums[row] += (loss_sum, part.num_samples)
                    see(part, outputs)
            progress_state.enter("validation")
    progress_state.enter("sums")
    loss_sum, num_samples = collectives.all_reduce_sum(sums.ravel()).reshape(sums.shape).sum(axis=0)
    values = metrics.compute(tally.totals(collectives))
    return Evaluation(loss_sum / num_samples, values, int(num_samples))
