"""From a data set to this rank's batches: global batches in the epoch's order, cut by rank, read ahead where slow."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from allstep.common.data.curriculum import Curriculum
from allstep.common.data.datasets.base import Split
from allstep.common.data.sharding import Position, global_batch, rank_slice, sample_order

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


def train_batches(
    split: Split,
    position: Position,
    *,
    global_batch_size: Callable[[int], int],
    seed: int,
    rank: int,
    world_size: int,
    drop_last: bool = False,
    curriculum: Curriculum | None = None,
) -> Iterator[Batch]:
    """This rank's batches from `position` to the end of its epoch.

    Args:
        global_batch_size: samples in the global batch that starts at the given offset of the epoch.
        drop_last: leave out samples at the end of the order that do not fill a global batch.
    """
    plans = _plan(len(split), position, global_batch_size, rank, world_size, drop_last=drop_last)
    order = curriculum.order if curriculum else functools.partial(sample_order, num_samples=len(split))
    return _batches(split, plans, world_size, lambda positions: order(positions, seed=seed, epoch=position.epoch))


def validation_batches(split: Split, global_batch_size: int, *, rank: int, world_size: int) -> Iterator[Batch]:
    """This rank's share of all validation samples, in their own order."""
    plans = _plan(len(split), Position(0, 0), lambda _: global_batch_size, rank, world_size)
    return _batches(split, plans, world_size, lambda indices: indices)


@dataclass(frozen=True)
class _Plan:
    """Positions [begin, end) of the epoch's order that this rank takes of the global batch [start, stop)."""

    start: int
    stop: int
    begin: int
    end: int
    epoch: int


def _plan(
    num_samples: int,
    position: Position,
    global_batch_size: Callable[[int], int],
    rank: int,
    world_size: int,
    *,
    drop_last: bool = False,
) -> Iterator[_Plan]:
    while bounds := global_batch(position, num_samples, global_batch_size(position.offset), drop_last=drop_last):
        begin, end = rank_slice(*bounds, rank=rank, world_size=world_size)
        yield _Plan(*bounds, begin, end, position.epoch)
        position = Position(position.epoch, bounds[1])


def _batches(
    split: Split, plans: Iterator[_Plan], world_size: int, order: Callable[[np.ndarray], np.ndarray]
) -> Iterator[Batch]:
    reads = (
        functools.partial(_read, split, plan, indices, world_size)
        for plan, indices in _with_indices(split, plans, order)
    )
    return read_ahead(reads, _BATCHES_AHEAD) if split.parallel else (read() for read in reads)


def _with_indices(
    split: Split, plans: Iterator[_Plan], order: Callable[[np.ndarray], np.ndarray]
) -> Iterator[tuple[_Plan, np.ndarray]]:
    for group in _grouped(plans):
        # A rank without samples in a global batch reads one that weighs nothing: it still has to take part.
        positions = [np.arange(plan.begin, max(plan.end, plan.begin + 1)) % len(split) for plan in group]
        indices = order(np.concatenate(positions))
        ends = np.cumsum([len(part) for part in positions])
        yield from zip(group, np.split(indices, ends[:-1]), strict=True)


def _read(split: Split, plan: _Plan, indices: np.ndarray, world_size: int) -> Batch:
    inputs, targets = split.read(indices, epoch=plan.epoch)
    num_samples, num_global = plan.end - plan.begin, plan.stop - plan.start
    return Batch(
        inputs,
        targets,
        num_samples,
        num_global,
        world_size / num_global if num_samples else 0.0,
        Position(plan.epoch, plan.stop),
    )


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
