"""Validation: exact means over all samples, whatever the number of ranks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from allstep.common.data.datasets.base import Split
from allstep.common.data.loader import Batch, validation_batches
from allstep.common.training.metrics import Metrics
from allstep.common.training.worker import Worker
from allstep.common.watch import ProgressState


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
    sums, tally = np.zeros((num_slices or 1, 2)), metrics.tally(num_slices or 1)
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
