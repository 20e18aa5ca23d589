"""Trial of a user's loss before training: losses of the parts of a batch have to make that of the whole.

Sums over samples, means over weights of classes or over tokens that are not padding, and losses that compare samples
with each other do not, so ranks would train something else than one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.base.random_state import seeded
from allstep.common.base.terminal import warn
from allstep.common.training.hooks import Check
from allstep.common.training.trial import num_parts

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
        logits, targets = _drawn(session.dataset)
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
                return
            raise UserError(
                f"expected a loss of each sample by itself, or the mean of these, from --loss {session.config.loss}, "
                f"received {whole / len(targets):.6g} for {len(targets)} samples and {parts / len(targets):.6g} for "
                "their parts, as ranks and passes have them; return a loss of each sample, or train in one process "
                "without --accumulate-steps and --slices"
            )
        if session.placement.rank == 0:
            warn(f"--loss {session.config.loss} is not tried on the parts of a batch: {reason}")

    def _measured(self, outputs: np.ndarray, targets: np.ndarray) -> tuple[float, float, float]:
        """Return the loss of the samples, that of another call, and the sum for two parts."""
        cut = len(targets) // 2
        with seeded():
            whole = self._measure(outputs, targets)
        with seeded():
            again = self._measure(outputs, targets)
        return whole, again, self._measure(outputs[:cut], targets[:cut]) + self._measure(outputs[cut:], targets[cut:])


def _drawn(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Return outputs of which the later half is larger, and targets: the first and the last classes, or real ones."""
    size, classes = 5, dataset.num_classes
    if dataset.task == "regression":
        indices = np.linspace(0, len(dataset.train) - 1, size).astype(np.int64)
        _, targets = dataset.train.read(indices, epoch=0)
    else:
        some = np.r_[: min(classes, 8), max(classes - 8, min(classes, 8)) : classes]
        size = max(size, len(some))
        targets = np.resize(some, (size, *dataset.target_shape))
    outputs = np.random.default_rng(0).standard_normal((size, *dataset.output_shape)).astype(np.float32)
    outputs[size // 2 :] *= 3
    return outputs, np.eye(classes, dtype=np.float32)[targets] if dataset.mixes_targets else targets
