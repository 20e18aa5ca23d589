"""From a data set to this rank's batches: global batches in the epoch's order, cut by rank, read ahead where slow."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from allstep.common.data.curriculum import Curriculum
from allstep.common.data.datasets.base import Split
from allstep.common.data.sharding import Position, global_batch, rank_slice, sample_order
from allstep.common.data.slices import local_slices

# Sample indices are computed for many steps at once: a call for one small batch costs more than its batch is worth.
_INDICES_AT_ONCE = 8192
_BATCHES_AHEAD = 2
Item = TypeVar("Item")
READ_AHEAD = "read-ahead"
"""Name of the threads that read batches ahead."""


@dataclass(frozen=True)
class Batch:
    """This rank's slice of a global batch."""

    inputs: np.ndarray
    """(samples, ...), as the data set has them."""
    targets: np.ndarray
    """(samples, ...)."""
    num_samples: int
    """True number of samples in the slice; 0 where the global batch has fewer samples than ranks."""
    num_global: int
    """Samples in the global batch."""
    loss_weight: float
    """Factor of the sum of the slice's losses, so that the average of gradients over ranks is the gradient of the
    mean loss of the global batch, whatever the slices' sizes: world_size / num_global, and 0 without samples."""
    position: Position
    """Where the run stands after this batch."""
    slices: Sequence[Slice] = ()
    """With --slices: those of this rank; `loss_weight` is 1 / num_global then, since gradients are added up."""
    read_slice_of: Callable[[int], Batch] | None = None
    """In a step of --audit: reads the slice of another rank of the same global batch."""

    def part(self, one: Slice) -> Batch:
        """A slice as a batch of its own, with a sample that weighs nothing where it has none."""
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
    """One of the parts into which --slices cuts a global batch."""

    number: int
    begin: int
    """Its samples are [begin, end) of the batch of the rank that has it."""
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
    curriculum: Curriculum | None = None,
) -> Iterator[Batch]:
    """This rank's batches from `position` to the end of its epoch.

    Args:
        global_batch_size: samples in the global batch that starts at the given offset of the epoch.
        num_slices: see `Batch.slices`.
        audited: whether the global batch that starts there has `Batch.read_slice_of`.
        drop_last: leave out samples at the end of the order that do not fill a global batch.
    """
    plans = _plan(len(split), position, global_batch_size, rank, world_size, num_slices, drop_last=drop_last)
    ordered = curriculum.order if curriculum else functools.partial(sample_order, num_samples=len(split))
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
    """This rank's share of all validation samples, in their own order."""
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
        """What is read; a rank without samples in a global batch reads one that weighs nothing: it has to take part."""
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
    """What `reads` return, in their order, each read in a thread of its own while the caller does something else.

    At most `depth` items are there or under way beyond the one that is given out or waited for, so that the last images
    of a batch are decoded beside the first of the next. Exceptions are raised here.
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
    # Daemons: a read that never returns does not keep the process from ending, as a pool's would.
    threading.Thread(target=target, args=arguments, name=READ_AHEAD, daemon=True).start()


def _fulfil(item: Future[Item], read: Callable[[], Item]) -> None:
    try:
        item.set_result(read())
    except Exception as error:
        item.set_exception(error)
