"""Data loader: cuts global batches in the epoch's order into this rank's batches, and prefetches slow data sets."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from allstep.common.data.datasets.base import Sampler, Split
from allstep.common.data.sharding import Position, global_batch, rank_slice, sample_order
from allstep.common.data.slices import local_slices

# Sample indices are computed for many steps at once, since a call for each small batch would cost too much.
_INDICES_AT_ONCE = 8192
_BATCHES_AHEAD = 2
Item = TypeVar("Item")
READ_AHEAD = "read-ahead"
"""Name of the threads that prefetch batches."""


@dataclass(frozen=True)
class Batch:
    """This rank's slice of a global batch."""

    inputs: np.ndarray
    """Inputs (samples, ...) as the data set returns them."""
    targets: np.ndarray
    """Targets (samples, ...)."""
    num_samples: int
    """True number of samples in the slice; 0 if the global batch is too small to give this rank any."""
    num_global: int
    """Samples in the global batch."""
    loss_weight: float
    """Factor for the sum of this rank's losses: world_size / num_global, or 0 without samples. Averaging gradients over
    ranks then gives the gradient of the global batch's mean loss, even if the ranks' slices differ in size."""
    position: Position
    """Position of the run after this batch."""
    slices: Sequence[Slice] = ()
    """Slices of this rank under --slices; `loss_weight` is then 1 / num_global, since gradients are summed."""
    read_slice_of: Callable[[int], Batch] | None = None
    """Function that reads another rank's slice of the same global batch; set in steps that --audit checks."""

    def part(self, one: Slice) -> Batch:
        """Return a slice as a batch; an empty slice becomes a batch of one sample with weight 0."""
        num_samples = one.end - one.begin
        samples = slice(one.begin, one.end) if num_samples else slice(0, 1)
        loss_weight = self.loss_weight if num_samples else 0.0
        return replace(
            self,
            inputs=self.inputs[samples],
            targets=self.targets[samples],
            num_samples=num_samples,
            loss_weight=loss_weight,
            slices=(),
        )


@dataclass(frozen=True)
class Slice:
    """One of the slices into which --slices cuts a global batch."""

    number: int
    begin: int
    """First sample; the slice consists of the samples [begin, end) of its rank's batch."""
    end: int


def train_batches(
    split: Split,
    position: Position,
    *,
    global_batch_size: Callable[[int], int],
    seed: int,
    rank: int,
    world_size: int,
    drop_last: bool = False,
    num_slices: int | None = None,
    audited: Callable[[int], bool] | None = None,
    sampler: Sampler | None = None,
) -> Iterator[Batch]:
    """Return this rank's batches from `position` to the end of its epoch.

    Args:
        global_batch_size: returns the size of the global batch that starts at the given offset of the epoch.
        num_slices: see `Batch.slices`.
        audited: returns whether the global batch that starts at an offset gets `Batch.read_slice_of`.
        drop_last: leave out samples at the end of the order that do not fill a global batch.
    """
    plans = _plan(len(split), position, global_batch_size, rank, world_size, num_slices, drop_last=drop_last)
    ordered = sampler.order if sampler else functools.partial(sample_order, num_samples=len(split))
    order = functools.partial(ordered, seed=seed, epoch=position.epoch)
    batches = _batches(split, plans, order)
    if audited is None:
        return batches

    def with_others(batch: Batch) -> Batch:
        stop = batch.position.offset
        start = stop - batch.num_global

        def read_slice_of(other: int) -> Batch:
            plan = _rank_plan(start, stop, position.epoch, other, world_size, num_slices)
            return _read(split, plan, order(plan.positions(len(split))))

        return replace(batch, read_slice_of=read_slice_of) if audited(start) else batch

    return map(with_others, batches)


def validation_batches(
    split: Split, global_batch_size: int, *, rank: int, world_size: int, num_slices: int | None = None
) -> Iterator[Batch]:
    """Return this rank's batches of all validation samples, in the order of the split."""
    plans = _plan(len(split), Position(0, 0), lambda _: global_batch_size, rank, world_size, num_slices)
    return _batches(split, plans, lambda indices: indices)


@dataclass(frozen=True)
class _Plan:
    """Positions [begin, end) of the epoch's order that this rank takes of the global batch [start, stop)."""

    start: int
    stop: int
    begin: int
    end: int
    epoch: int
    loss_weight: float
    slices: Sequence[Slice]

    def positions(self, num_samples: int) -> np.ndarray:
        """Return the positions to read; a rank without samples reads one of weight 0, so that it joins the step."""
        return np.arange(self.begin, max(self.end, self.begin + 1)) % num_samples


def _plan(
    num_samples: int,
    position: Position,
    global_batch_size: Callable[[int], int],
    rank: int,
    world_size: int,
    num_slices: int | None,
    *,
    drop_last: bool = False,
) -> Iterator[_Plan]:
    while bounds := global_batch(position, num_samples, global_batch_size(position.offset), drop_last=drop_last):
        yield _rank_plan(*bounds, position.epoch, rank, world_size, num_slices)
        position = Position(position.epoch, bounds[1])


def _rank_plan(start: int, stop: int, epoch: int, rank: int, world_size: int, num_slices: int | None) -> _Plan:
    begin, end = rank_slice(start, stop, rank=rank, world_size=world_size)
    loss_weight, slices = world_size / (stop - start), ()
    if num_slices:
        own = local_slices(rank, world_size, num_slices)
        cuts = [rank_slice(start, stop, rank=number, world_size=num_slices) for number in own]
        begin, end, loss_weight = cuts[0][0], cuts[-1][1], 1 / (stop - start)
        slices = [Slice(number, cut[0] - begin, cut[1] - begin) for number, cut in zip(own, cuts, strict=True)]
    return _Plan(start, stop, begin, end, epoch, loss_weight if end > begin else 0.0, slices)


def _batches(split: Split, plans: Iterator[_Plan], order: Callable[[np.ndarray], np.ndarray]) -> Iterator[Batch]:
    reads = (functools.partial(_read, split, plan, indices) for plan, indices in _with_indices(split, plans, order))
    return read_ahead(reads, _BATCHES_AHEAD) if split.parallel else (read() for read in reads)


def _with_indices(
    split: Split, plans: Iterator[_Plan], order: Callable[[np.ndarray], np.ndarray]
) -> Iterator[tuple[_Plan, np.ndarray]]:
    for group in _grouped(plans):
        positions = [plan.positions(len(split)) for plan in group]
        indices = order(np.concatenate(positions))
        ends = np.cumsum([len(part) for part in positions])
        yield from zip(group, np.split(indices, ends[:-1]), strict=True)


def _read(split: Split, plan: _Plan, indices: np.ndarray) -> Batch:
    inputs, targets = split.read(indices, epoch=plan.epoch)
    num_samples, num_global = plan.end - plan.begin, plan.stop - plan.start
    position = Position(plan.epoch, plan.stop)
    return Batch(inputs, targets, num_samples, num_global, plan.loss_weight, position, plan.slices)


def _grouped(plans: Iterator[_Plan]) -> Iterator[list[_Plan]]:
    group: list[_Plan] = []
    size = 0
    for plan in plans:
        group.append(plan)
        size += plan.end - plan.begin
        if size >= _INDICES_AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group


def read_ahead(reads: Iterator[Callable[[], Item]], depth: int) -> Iterator[Item]:
    """Yield what `reads` return, in order, running each read in its own background thread.

    At most `depth` items are ready or being read beyond the one that the caller has or waits for, so that the last
    images of a batch are decoded together with the first of the next. Exceptions are raised here.
    """
    ready: queue.Queue[Future[Item] | None] = queue.Queue(depth)
    stopped = threading.Event()

    def put(item: Future[Item] | None) -> bool:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def run() -> None:
        try:
            for read in reads:
                if not put(item := Future()):
                    return
                _start(_fulfil, item, read)
            put(None)
        except Exception as error:
            put(failed := Future())
            failed.set_exception(error)

    _start(run)
    try:
        while (item := ready.get()) is not None:
            yield item.result()
    finally:
        stopped.set()


def _start(target: Callable, *arguments: object) -> None:
    # Daemon threads, so that a read that never returns cannot keep the process from exiting, as a pool's thread would.
    threading.Thread(target=target, args=arguments, name=READ_AHEAD, daemon=True).start()


def _fulfil(item: Future[Item], read: Callable[[], Item]) -> None:
    try:
        item.set_result(read())
    except Exception as error:
        item.set_exception(error)
