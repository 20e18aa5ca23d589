"""Batches of a data set for each rank. Oracle: each sample comes once for any batch size, and weights add up."""

from __future__ import annotations

import functools
import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.common.data.datasets.base import ArraySplit
from allstep.common.data.loader import Batch, read_ahead, train_batches, validation_batches
from allstep.common.data.sharding import Position

counts = st.integers(1, 300)
world_sizes = st.integers(1, 9)


def numbered(num_samples: int) -> ArraySplit:
    """Return samples whose label is their index; the pixel is the index modulo 256."""
    labels = np.arange(num_samples)
    return ArraySplit((labels % 256).astype(np.uint8).reshape(-1, 1, 1, 1), labels)


def epoch_of(
    num_samples: int, batch_size: int, world_size: int, *, offset: int = 0, seed: int = 0
) -> list[list[Batch]]:
    """Return the global batches from `offset` on, each as the list of all ranks' batches."""
    ranks = [
        train_batches(
            numbered(num_samples),
            Position(3, offset),
            global_batch_size=lambda _: batch_size,
            seed=seed,
            rank=rank,
            world_size=world_size,
        )
        for rank in range(world_size)
    ]
    return [list(batches) for batches in zip(*ranks, strict=True)]


def seen(batches: list[list[Batch]]) -> list[int]:
    """Return the labels of the samples that count, in order."""
    return [label for batch in batches for part in batch for label in part.targets[: part.num_samples].tolist()]


@given(counts, counts, world_sizes)
@settings(max_examples=60, deadline=None)
def test_every_sample_once_in_the_same_order_on_any_number_of_ranks(num_samples, batch_size, world_size):
    samples = seen(epoch_of(num_samples, batch_size, world_size))
    assert sorted(samples) == list(range(num_samples))
    assert samples == seen(epoch_of(num_samples, batch_size, 1))


@given(counts, counts, world_sizes, world_sizes, st.data())
@settings(max_examples=60, deadline=None)
def test_goes_on_from_any_batch_on_another_number_of_ranks(num_samples, batch_size, before, after, data):
    batches = epoch_of(num_samples, batch_size, before)
    done = data.draw(st.integers(0, len(batches)))
    position = batches[done - 1][0].position if done else Position(3, 0)
    rest = epoch_of(num_samples, batch_size, after, offset=position.offset)
    assert seen(batches[:done]) + seen(rest) == seen(batches)


@given(counts, counts, world_sizes)
@settings(max_examples=60, deadline=None)
def test_average_of_weighted_sums_is_the_mean_of_the_global_batch(num_samples, batch_size, world_size):
    """Oracle: the mean over the global batch of a number known for each sample."""
    for batch in epoch_of(num_samples, batch_size, world_size):
        labels = [label for part in batch for label in part.targets[: part.num_samples]]
        assert [part.num_global for part in batch] == [len(labels)] * world_size
        assert len({part.position for part in batch}) == 1
        sums = [part.targets[: part.num_samples].sum() * part.loss_weight for part in batch]
        assert sum(sums) / world_size == pytest.approx(np.mean(labels))


@given(counts, counts, world_sizes)
@settings(max_examples=60, deadline=None)
def test_a_rank_without_samples_has_a_batch_that_weighs_nothing(num_samples, batch_size, world_size):
    for part in (part for batch in epoch_of(num_samples, batch_size, world_size) for part in batch):
        assert len(part.targets) == len(part.inputs) == max(1, part.num_samples)
        assert (part.loss_weight == 0) == (part.num_samples == 0)
        assert np.array_equal(part.inputs.ravel(), part.targets % 256)


def test_seed_and_epoch_change_the_order():
    orders = [seen(epoch_of(100, 10, 2, seed=seed)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_batch_size_follows_the_offset():
    batches = train_batches(
        numbered(100),
        Position(0, 0),
        global_batch_size=lambda offset: 10 if offset < 30 else 25,
        seed=0,
        rank=0,
        world_size=1,
    )
    assert [batch.num_samples for batch in batches] == [10, 10, 10, 25, 25, 20]


@given(counts, counts, world_sizes)
@settings(max_examples=60, deadline=None)
def test_validation_counts_every_sample_once(num_samples, batch_size, world_size):
    ranks = [
        validation_batches(numbered(num_samples), batch_size, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    assert seen([list(batches) for batches in zip(*ranks, strict=True)]) == list(range(num_samples))


class Slow(ArraySplit):
    """A split that allows reading ahead, counts its reads, and may raise at one of them."""

    parallel = True

    def __init__(self, num_samples: int, *, breaks_at: int | None = None) -> None:
        super().__init__(numbered(num_samples).inputs, numbered(num_samples).targets)
        self.breaks_at, self.num_reads = breaks_at, 0

    def read(self, indices, *, epoch):
        if self.num_reads == self.breaks_at:
            raise OSError("unreadable image")
        self.num_reads += 1
        return super().read(indices, epoch=epoch)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


def wait_for_end_of_readers() -> None:
    for thread in readers():
        thread.join(timeout=10)
    assert not readers()


def test_reading_ahead_changes_nothing():
    ahead = validation_batches(Slow(100), 7, rank=1, world_size=3)
    plain = validation_batches(numbered(100), 7, rank=1, world_size=3)
    assert [batch.targets.tolist() for batch in ahead] == [batch.targets.tolist() for batch in plain]
    wait_for_end_of_readers()


def test_reading_ahead_raises_where_the_reader_did():
    batches = validation_batches(Slow(100, breaks_at=4), 10, rank=0, world_size=1)
    assert [next(batches).targets[0] for _ in range(4)] == [0, 10, 20, 30]
    with pytest.raises(OSError, match="unreadable image"):
        next(batches)
    wait_for_end_of_readers()


def test_reading_ahead_stays_within_its_depth_and_stops_when_it_is_left():
    """After one batch was taken, the thread has at most `depth` batches in the queue and one in progress."""
    split = Slow(10_000)
    batches = validation_batches(split, 10, rank=0, world_size=1)
    next(batches)
    batches.close()
    wait_for_end_of_readers()
    assert split.num_reads <= 1 + 2 + 1


def test_reading_ahead_keeps_the_order():
    assert list(read_ahead((functools.partial(abs, i) for i in range(100)), depth=3)) == list(range(100))


def test_two_batches_are_read_at_once():
    """The first read waits until another one runs; a single reader would time out."""
    num_started, are_two = itertools.count(1), threading.Event()

    def read() -> bool:
        if next(num_started) == 2:
            are_two.set()
        return are_two.wait(20)

    assert all(read_ahead((read for _ in range(10)), depth=2))
