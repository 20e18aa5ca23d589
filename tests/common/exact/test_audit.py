"""The audit of slices. The oracle is the rank that is made to compute wrongly; ranks are threads of this process."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from allstep.common.data.datasets.base import ArraySplit
from allstep.common.data.loader import train_batches
from allstep.common.data.sharding import Position
from allstep.common.exact.audit import UnequalBits, audit, audited_steps


class Threads:
    """All-gather between the threads of a process."""

    def __init__(self, rank, world_size, rows, barrier):
        self.rank, self.world_size, self._rows, self._barrier = rank, world_size, rows, barrier

    def all_gather(self, values):
        self._rows[self.rank] = values
        self._barrier.wait(10)
        gathered = np.stack([self._rows[rank] for rank in range(self.world_size)])
        self._barrier.wait(10)
        return gathered


def what_ranks_say(world_size, num_slices, wrong):
    """Return the message that all ranks give; `wrong(rank, number)` is added to a rank's result for a slice."""
    rows, barrier = {}, threading.Barrier(world_size)

    def one_rank(rank):
        split = ArraySplit(np.zeros((30, 1), np.uint8), np.arange(30))
        batches = train_batches(
            split, Position(0, 0), global_batch_size=lambda _: 11, seed=1, rank=rank, world_size=world_size,
            num_slices=num_slices, audited=lambda start: start == 11,
        )  # fmt: skip

        def compute(batch):
            sums = {one.number: int(batch.part(one).targets @ np.arange(1, 1 + len(batch.part(one).targets)))
                    for one in batch.slices}  # fmt: skip
            return {number: total + wrong(rank, number) for number, total in sums.items()}

        _, batch, _ = batches
        try:
            audit(batch, compute(batch), compute, Threads(rank, world_size, rows, barrier), num_slices)
        except UnequalBits as error:
            return str(error)
        return None

    with ThreadPoolExecutor(world_size) as pool:
        messages = set(pool.map(one_rank, range(world_size)))
    assert len(messages) == 1
    return messages.pop()


SIZES = [(1, 1), (1, 4), (2, 2), (2, 5), (3, 3), (3, 8), (4, 4), (5, 7)]


@pytest.mark.parametrize(("world_size", "num_slices"), SIZES)
def test_who_is_alone_with_its_bits_is_named(world_size, num_slices):
    assert what_ranks_say(world_size, num_slices, lambda *_: 0) is None
    for culprit in range(world_size):
        message = what_ranks_say(world_size, num_slices, lambda rank, _, culprit=culprit: rank == culprit)
        if world_size > 2:
            assert message.startswith(f"rank {culprit} computes slice ")
        elif world_size == 2:
            assert message.startswith("ranks 0 and 1 compute slice 0 with different bits, and no other rank")
        else:
            assert message is None  # it computes the same wrong result twice


def test_one_wrong_slice_is_named():
    message = what_ranks_say(3, 6, lambda rank, number: rank == 2 and number == 3)
    assert message == "rank 2 computes slice 3 with other bits than ranks 1 and 0; look at its host"
    message = what_ranks_say(3, 6, lambda rank, number: rank * (number in (3, 4)))
    assert message == (
        "ranks 1, 2 and 0 compute slice 3 with different bits, and no other rank says which of them is right; "
        "and 1 more of 6 slices"
    )


def test_a_share_of_steps_is_audited():
    assert audited_steps(None, seed=1, epoch=0) is None
    for share in (0.1, 0.5, 1.0):
        audited = audited_steps(share, seed=3, epoch=2)
        assert audited is not None
        chosen = [audited(offset) for offset in range(0, 64_000, 32)]
        assert abs(np.mean(chosen) - share) < 0.04
        other = audited_steps(share, seed=3, epoch=3)
        assert other is not None
        assert share == 1 or chosen != [other(offset) for offset in range(0, 64_000, 32)]
