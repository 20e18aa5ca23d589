"""Validation: exact means over all samples, whatever the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from allstep.common.data.datasets.base import Split
from allstep.common.data.loader import validation_batches
from allstep.common.watch import ProgressState
from allstep.common.worker import Worker


class Stopped(Exception):
    """The ranks were asked to stop, and all stand at the same point."""


@dataclass(frozen=True)
class Evaluation:
    """Exact means over all samples of a split."""

    loss: float
    metric: float
    """See `common.losses.metric_of`."""
    num_samples: int


def evaluate(
    worker: Worker, split: Split, global_batch: int, progress_state: ProgressState, *, num_slices: int | None = None
) -> Evaluation:
    """Mean loss and metric with every sample counted once over all ranks, for any number of ranks.

    Args:
        num_slices: with --slices, into how many parts a batch is cut, each of which is evaluated by itself.

    Raises:
        Stopped: see there.
    """
    collectives = worker.collectives
    # A row a slice, to which one rank alone adds: so no sum over ranks depends on their number.
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
                # A rank without samples takes part: it may hold weights that the others need.
                loss_sum, metric_sum = worker.eval_step(part)
                if part.num_samples:
                    sums[row] += (loss_sum, metric_sum, part.num_samples)
            progress_state.enter("validation")
    progress_state.enter("sums")
    loss_sum, metric_sum, num_samples = collectives.all_reduce_sum(sums.ravel()).reshape(sums.shape).sum(axis=0)
    return Evaluation(loss_sum / num_samples, metric_sum / num_samples, int(num_samples))
