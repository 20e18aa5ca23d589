"""Parts for those who keep a training loop of their own: exact shards, a watch, checkpoints. Each is of use alone.

`pytorch/own_loop.py` and `tensorflow/own_loop.py` have them for their framework.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from allstep.common.data.sharding import Position, check, global_batch, rank_slice, sample_order
from allstep.common.launch.placement import Placement, placement
from allstep.common.process import exit
from allstep.common.watch import Limits, ProgressState, watching

if TYPE_CHECKING:
    from allstep.common.collectives import Collectives


class Order:
    """Which samples this rank takes, batch by batch: the order of an epoch depends on seed and epoch alone.

    A global batch is cut into slices by rank, so that every sample comes once an epoch, on any number of ranks.
    """

    def __init__(
        self, num_samples: int, global_batch_size: int, *, seed: int, drop_last: bool, place: Placement | None = None
    ) -> None:
        """`place`: of this rank; as the launcher says where not given.

        Raises:
            UserError: see `sharding.check`.
        """
        check(num_samples, global_batch_size, drop_last=drop_last)
        self.num_samples, self.global_batch_size, self.seed, self.drop_last = (
            num_samples, global_batch_size, seed, drop_last,
        )  # fmt: skip
        self.place = place or placement()

    def rest_of_epoch(self, position: Position) -> Iterator[tuple[np.ndarray, float, Position]]:
        """From `position` to the end of its epoch: sample indices, their weight, and where the run stands after them.

        The weight times the mean loss of the samples, averaged over ranks, is the mean loss of the global batch. Where
        a global batch has fewer samples than ranks, some get one of weight 0: they still have to take part.
        """
        num, rank, world_size = self.num_samples, self.place.rank, self.place.world_size
        while bounds := global_batch(position, num, self.global_batch_size, drop_last=self.drop_last):
            begin, end = rank_slice(*bounds, rank=rank, world_size=world_size)
            positions = np.arange(begin, max(end, begin + 1)) % num
            indices = sample_order(positions, num, seed=self.seed, epoch=position.epoch)
            position = Position(position.epoch, bounds[1])
            is_last = global_batch(position, num, self.global_batch_size, drop_last=self.drop_last) is None
            after = Position(position.epoch + 1, 0) if is_last else position
            yield indices, world_size * (end - begin) / (bounds[1] - bounds[0]), after


class Shard:
    """An epoch's batches of this rank, as often as it is iterated; it knows where it stands.

    for epoch in range(5):
        for x, y in batches:
            loss = batches.weight * loss_of(model(x), y)
            ...
            position = batches.position    # to be saved; batches.position = position goes on from there
    """

    def __init__(self, order: Order, read: Callable[[Iterator[np.ndarray]], Iterator[Any]]) -> None:
        """`read` makes batches of the indices of samples, in their order; it may run ahead."""
        self._order, self._read = order, read
        self.position = Position(0, 0)
        """Where the run stands after the batch that was given out last."""
        self.weight = 1.0
        """Factor of that batch's mean loss, so that its average over ranks is the mean of the global batch."""

    def __iter__(self) -> Iterator[Any]:
        plans = list(self._order.rest_of_epoch(self.position))
        for batch, (_, weight, position) in zip(self._read(indices for indices, _, _ in plans), plans, strict=False):
            # With the last batch, for libraries that count batches never ask for one more.
            self.weight, self.position = weight, position
            yield batch

    def __len__(self) -> int:
        """Batches in an epoch."""
        full, rest = divmod(self._order.num_samples, self._order.global_batch_size)
        return full + (rest > 0 and not self._order.drop_last)


class Steps:
    """What a watched loop says of itself."""

    def __init__(self, state: ProgressState) -> None:
        self._state = state

    def begin(self, step: int) -> bool:
        """Say that a step begins; all ranks do, with the same number.

        Returns: False where the ranks were asked to stop (SIGTERM or SIGUSR1 to any of them): none of them begins it.
        """
        self._state.step = step
        self._state.enter("step")
        return self._state.begin_tick()


@contextlib.contextmanager
def watch(collectives: Collectives, *, stall_timeout: float = 10.0, fault_timeout: float = 30.0) -> Iterator[Steps]:
    """Have the ranks watch each other while the block runs: a rank that dies or is stuck ends the job, with a report.

    What the block raises ends the process with the status and the line that a trainer would have.

    Args:
        stall_timeout: seconds without a step after which a rank that the others wait for counts as stuck.
        fault_timeout: seconds within which the job ends when a host cannot be reached any more.
    """
    place, state = placement(), ProgressState()
    limits = Limits(stall=stall_timeout, silence=fault_timeout, launcher=0.0)
    with watching(collectives, place, state, limits):
        try:
            yield Steps(state)
        except Exception as error:
            caught = error  # raised by run_rank, which says it once for all ranks and ends this one

            def fail() -> None:
                raise caught

            exit.run_rank(fail)
