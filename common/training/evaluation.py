"""Validation: exact means over all samples, whatever the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from allstep.common.data.datasets.base import Split
from allstep.common.data.loader import validation_batches
from allstep.common.training.worker import Worker
from allstep.common.watch import ProgressState


class Stopped(Exception):
    """Raised when the ranks were asked to stop and have all reached the same point."""


@dataclass(frozen=True)
class Evaluation:
    """Exact means over all samples of a split."""

    loss: float
    metric: float
    """Mean of the metric that `common.catalog.losses.metric_of` names."""
    num_samples: int


def evaluate(
    worker: Worker, split: Split, global_batch: int, progress_state: ProgressState, *, num_slices: int | None = None
) -> Evaluation:
    """Return the mean loss and metric; every sample counts once, whatever the number of ranks.

    Args:
        num_slices: with --slices, number of slices that a batch is cut into, each of which is evaluated separately.

    Raises:
        Stopped: the ranks were asked to stop.
    """
    collectives = worker.collectives
    # Each slice has a row to which only one rank adds, so no sum depends on the number of ranks.
    sums = np.zeros((num_slices or 1, 3))
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
                loss_sum, metric_sum = worker.eval_step(part)
                if part.num_samples:
                    sums[row] += (loss_sum, metric_sum, part.num_samples)
            progress_state.enter("validation")
    progress_state.enter("sums")
    loss_sum, metric_sum, num_samples = collectives.all_reduce_sum(sums.ravel()).reshape(sums.shape).sum(axis=0)
    return Evaluation(loss_sum / num_samples, metric_sum / num_samples, int(num_samples))
