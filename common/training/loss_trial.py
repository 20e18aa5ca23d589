"""Trial of a user's loss before training: losses of the parts of a batch have to make that of the whole.

Sums over samples, means over weights of classes or over tokens that are not padding, and losses that compare samples
with each other do not, so ranks would train something else than one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from allstep.common.base.errors import UserError, warn
from allstep.common.base.random_state import seeded
from allstep.common.training.hooks import Check
from allstep.common.training.trial_check import num_parts

if TYPE_CHECKING:
    from allstep.common.data.datasets import Dataset
    from allstep.common.training.training_run import TrainingRun


class LossCheck(Check):
    """Hook that refuses a loss that depends on how a batch is cut, if it is."""

    def __init__(self, measure: Callable[[np.ndarray, np.ndarray], float]) -> None:
        """`measure` takes outputs and targets of some samples, and returns the loss, times their number."""
        self._measure = measure

    def check(self, session: TrainingRun) -> None:
        """Compare the loss of some samples with those of their parts. Raises UserError if they differ."""
        if num_parts(session) == 1:
            return
        reasons = {self._try(*drawn, session.config.loss) for drawn in _drawn(session.dataset)} - {""}
        if reasons and session.placement.rank == 0:
            warn(f"--loss {session.config.loss} is not tried on the parts of a batch: {min(reasons)}")

    def _try(self, logits: np.ndarray, targets: np.ndarray, loss: str | None) -> str:
        """Return why the loss could not be tried, or an empty text."""
        reason = ""
        for outputs in (logits, 1 / (1 + np.exp(-logits))):  # some losses take probabilities alone
            try:
                whole, again, parts = self._measured(outputs, targets)
            except UserError as error:
                reason = str(error).partition(";")[0]
                continue
            if not math.isfinite(whole):
                reason = f"it is {whole} for numbers drawn at random"
                continue
            if np.allclose((again, parts), whole, rtol=1e-3, atol=1e-5):
                return ""
            raise UserError(
                f"expected a loss of each sample by itself, or the mean of these, from --loss {loss}, received "
                f"{whole / len(targets):.6g} for {len(targets)} samples and {parts / len(targets):.6g} for their "
                "parts, as ranks and passes have them; return a loss of each sample, or train in one process without "
                "--accumulate-steps and --slices"
            )
        return reason

    def _measured(self, outputs: np.ndarray, targets: np.ndarray) -> tuple[float, float, float]:
        """Return the loss of the samples, that of another call, and the sum for two parts."""
        cut = len(targets) // 2
        with seeded():
            whole = self._measure(outputs, targets)
        with seeded():
            again = self._measure(outputs, targets)
        return whole, again, self._measure(outputs[:cut], targets[:cut]) + self._measure(outputs[cut:], targets[cut:])


_AT_ONCE, _LOOKED_AT, _MAX_DRAWN = 16, 2**16, 2**24
"""Samples of one comparison, few enough for a single one that does not count to show; real targets that are looked at;
and numbers in the outputs of all comparisons."""
_EVENLY, _MAX_COLUMNS = 5, 16
_CLOSE, _CERTAIN = 0.01, 20.0
"""Distance to the targets, and logits of the right classes, where a loss is nearly 0."""


def _drawn(dataset: Dataset) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield outputs of which the later half is larger, with targets that a loss may leave out or weigh otherwise.

    These are the first and the last classes, or real targets that are the smallest, largest or most frequent. In the
    first ones, the earlier half is also right, since a loss may change with the mean, as flooding does.
    """
    numbers = math.prod(dataset.output_shape)
    at_once = _AT_ONCE if numbers * _AT_ONCE <= _MAX_DRAWN else _EVENLY
    of_numbers = dataset.task == "regression"
    draw, is_first = np.random.default_rng(0), True
    for targets in _special_targets(dataset) if of_numbers else _classes(dataset, at_once, numbers):
        outputs = draw.standard_normal((len(targets), *dataset.output_shape), np.float32)
        half = len(targets) // 2
        outputs[half:] *= 3
        given = np.eye(dataset.num_classes, dtype=np.float32)[targets] if dataset.mixes_targets else targets
        yield outputs, given
        if is_first and of_numbers:
            outputs[:half] = targets[:half] + _CLOSE * outputs[:half]
            yield outputs, given
        elif is_first:
            np.put_along_axis(outputs[:half], targets[:half, ..., None], _CERTAIN, -1)
            yield outputs, given
        is_first = False


def _classes(dataset: Dataset, at_once: int, numbers: int) -> Iterator[np.ndarray]:
    """Yield classes, each in a sample of its own; of very many, the first and the last ones."""
    count = min(dataset.num_classes, at_once * max(1, _MAX_DRAWN // (at_once * numbers)))
    chosen = np.r_[: -(-count // 2), dataset.num_classes - count // 2 : dataset.num_classes]
    for some in np.array_split(chosen, -(-count // at_once)):
        rows = np.resize(some, max(_EVENLY, len(some)))
        yield np.repeat(rows, math.prod(dataset.target_shape)).reshape(-1, *dataset.target_shape)


def _special_targets(dataset: Dataset) -> Iterator[np.ndarray]:
    """Yield rows of real targets: some at equal distances, then those with special values in one of the columns."""
    if (targets := getattr(dataset.train, "targets", None)) is None:
        looked_at = np.linspace(0, len(dataset.train) - 1, _AT_ONCE).astype(np.int64)
        _, targets = dataset.train.read(looked_at, epoch=0)
    last = len(targets) - 1
    evenly, looked_at = (
        np.linspace(0, last, number).astype(np.int64) for number in (_EVENLY, min(last + 1, _LOOKED_AT))
    )
    for column in targets.T[:_MAX_COLUMNS]:
        _, first, counts = np.unique(column[looked_at], return_index=True, return_counts=True)
        frequent = looked_at[first[np.argsort(-counts, kind="stable")[: _AT_ONCE - _EVENLY - 2]]]
        yield targets[np.r_[evenly, frequent[::-1], column.argmin(), column.argmax()]]
