"""Independent building blocks for a user's training loop: exact shards and a watchdog.

`pytorch/user_loop.py` and `tensorflow/user_loop.py` adapt them to their frameworks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.data.sharding import Position, check, global_batch, rank_slice, sample_order
from allstep.common.launch.placement import find_placement
from allstep.common.launch.unclaimed_ranks import current_ranks
from allstep.common.process import exit
from allstep.common.watch import Limits, ProgressState, watching

if TYPE_CHECKING:
    from allstep.common.base.collectives import Collectives


class Order:
    """Order of this rank's samples, batch by batch; the order of an epoch depends only on seed and epoch.

    A global batch is cut into one slice per rank, so each sample comes once per epoch on any number of ranks.
    """

    def __init__(
        self,
        num_samples: int,
        global_batch_size: int,
        *,
        seed: int,
        drop_last: bool,
        ranks: Callable[[], tuple[int, int]] = current_ranks,
    ) -> None:
        """Check the arguments; `ranks` returns this rank and the world size, which an elastic job may change.

        Raises:
            UserError: see `common.data.sharding.check` and `current_ranks`.
        """
        ranks()
        check(num_samples, global_batch_size, drop_last=drop_last)
        self.num_samples: int = num_samples
        self.global_batch_size: int = global_batch_size
        self.seed: int = seed
        self.drop_last: bool = drop_last
        self._ranks = ranks

    def rest_of_epoch(self, position: Position) -> Iterator[tuple[np.ndarray, float, Position]]:
        """Yield batches from `position` to the end of its epoch: sample indices, their weight, and the next position.

        The weight times the mean loss of the samples, averaged over ranks, is the mean loss of the global batch. If a
        global batch has fewer samples than ranks, some ranks get a sample of weight 0, since all ranks must take part.
        """
        num, (rank, world_size) = self.num_samples, self._ranks()
        while bounds := global_batch(position, num, self.global_batch_size, drop_last=self.drop_last):
            begin, end = rank_slice(*bounds, rank=rank, world_size=world_size)
            positions = np.arange(begin, max(end, begin + 1)) % num
            indices = sample_order(positions, num, seed=self.seed, epoch=position.epoch)
            position = Position(position.epoch, bounds[1])
            is_last = global_batch(position, num, self.global_batch_size, drop_last=self.drop_last) is None
            after = Position(position.epoch + 1, 0) if is_last else position
            yield indices, world_size * (end - begin) / (bounds[1] - bounds[0]), after


class Shard:
    """Iterable of this rank's batches; each iteration is an epoch, and `position` tracks the progress.

    for epoch in range(5):
        for x, y in batches:
            loss = batches.weight * loss_of(model(x), y)
            ...
            position = batches.position    # to be saved; batches.position = position goes on from there
    """

    def __init__(self, order: Order, read: Callable[[Iterator[np.ndarray]], Iterator[Any]]) -> None:
        """Start at the first epoch; `read` turns sample indices into batches, in order, and may prefetch."""
        self._order, self._read = order, read
        self.position: Position = Position(0, 0)
        """Position of the run after the last batch."""
        self.weight: float = 1.0
        """Factor for the mean loss of the last batch that makes its average over ranks the mean of the global batch."""

    def __iter__(self) -> Iterator[Any]:
        plans = list(self._order.rest_of_epoch(self.position))
        for batch, (_, weight, position) in zip(self._read(indices for indices, _, _ in plans), plans, strict=False):
            # Set these before the last batch is yielded, because libraries that count batches never ask for one more.
            self.weight, self.position = weight, position
            yield batch

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        full, rest = divmod(self._order.num_samples, self._order.global_batch_size)
        return full + (rest > 0 and not self._order.drop_last)


class Steps:
    """Reports the steps of a watched loop to the watchdog."""

    def __init__(self, state: ProgressState) -> None:
        self._state = state

    def begin(self, step: int) -> bool:
        """Report that a step begins; all ranks call it with the same number.

        Returns: False if the ranks were asked to stop (SIGTERM, SIGUSR1 or SIGHUP to any); then no rank begins it.
        """
        self._state.step = step
        self._state.enter("step")
        return self._state.begin_tick()


@contextlib.contextmanager
def watch(collectives: Collectives, *, stall_timeout: float = 10.0, fault_timeout: float = 30.0) -> Iterator[Steps]:
    """Let the ranks watch each other while the block runs; a rank that dies or is stuck ends the job, with a report.

    If the block raises, the process ends with the exit status and the message of a trainer.

    Args:
        stall_timeout: seconds without a step after which a rank that the others wait for counts as stuck.
        fault_timeout: seconds until the job ends after a host has become unreachable.
    """
    placement, state = find_placement(), ProgressState()
    rank, world_size = collectives.rank, collectives.world_size
    if (rank, world_size) != (placement.rank, placement.world_size):
        raise UserError(
            f"expected watch() to be called on the ranks that a launcher has started, received rank {rank} of "
            f"{world_size}, by the launcher {placement.rank} of {placement.world_size}; start them by torchrun or "
            "horovodrun, and leave watch() out of an elastic job"
        )
    limits = Limits(stall=stall_timeout, silence=fault_timeout, launcher=0.0)
    with watching(collectives, placement, state, limits):
        try:
            yield Steps(state)
        except Exception as error:
            caught = error  # raised again in run_rank, which reports it once for all ranks and ends this one

            def fail() -> None:
                raise caught

            exit.run_rank(fail)
