"""Observe torch's DataLoader and its data set, and cut each loop when enough of it was observed.

The classes of its iterators are private (as of torch 2.14).
"""

import functools
import random
import sys
import weakref
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace as replace_field
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from allstep.commands.prove.observer import values
from allstep.commands.prove.observer.observer import Observer, replace
from allstep.commands.prove.observer.pytorch_values import as_rows, bytes_of
from allstep.commands.prove.observer.values import digest
from allstep.commands.prove.records import Batch, Held, LoopEnd, Sampler, Yielded

_LOOP, _NUM_BATCHES = "_allstep_loop", "_allstep_num_batches"


class Loaders:
    """Loaders of one process."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._data_sets: list[Any] = []
        self._data_of_loop: dict[int | None, Any] = {}
        self._last_loop = 0
        self._cut: StopIteration | None = None  # the last end of a loop that a library has cut short
        self._last_states: tuple[str, ...] = ()
        self._rows = observer.quiet("batches of loaders without digests", values.Samples(as_rows).rows, ())
        observer.look_last(lambda: held(self._data_of_loop.get(observer.progress.first_training_loop)))

    def observe_iter(self, loader: DataLoader) -> Generator[None, Any, None]:
        """Observe that a loop begins."""
        sampler = _sampler(loader)
        if sys.exc_info()[1] is self._cut is not None:
            sampler = replace_field(sampler, shuffles=False)  # a library starts over within an epoch, which it counts
        loop = self._observer.begin_loop(
            _length(loader),
            num_samples=_length(loader.dataset),
            sampler=sampler,
            data=self._number_of(loader.dataset),
            num_workers=loader.num_workers,
        )
        self._last_loop = loop.number
        if (persistent := getattr(loader, "_iterator", None)) is not None:
            vars(persistent)[_LOOP] = loop.number  # its workers get their first indices before it is returned
        if self._observer.progress.first_training_loop is None:
            self._data_of_loop[loop.number] = loader.dataset
        iterator = yield
        vars(iterator).update({_LOOP: loop.number, _NUM_BATCHES: 0})
        weakref.finalize(iterator, self._observer.progress.abandon, loop.number).atexit = False

    def is_over(self, iterator: Any, frame: FrameType | None) -> bool:
        """Return whether a loop is to be cut, and record it."""
        loop, num_batches = vars(iterator)[_LOOP], vars(iterator)[_NUM_BATCHES]
        if not self._observer.progress.is_over(loop, num_batches) or not self._observer.may_stop(frame):
            return False
        self._end(loop, num_batches, is_cut=True)
        return True

    def end_of_cut(self, frame: FrameType) -> StopIteration:
        """Return the exception that ends a loop, which goes on in `frame`."""
        error = StopIteration()
        self._cut = None if self._observer.is_of_script(frame) else error
        return error

    def note_batch(self, iterator: Any, batch: Any, before: tuple[str, ...]) -> None:
        """Record a batch that a loader yields, and the random states before it was read."""
        loop = vars(iterator)[_LOOP]
        vars(iterator)[_NUM_BATCHES] += 1
        self._observer.progress.enter(loop)
        pairs = zip(before, self._last_states or before, strict=True)
        states = tuple(state if state != last else "" for state, last in pairs)
        self._last_states = before
        self._observer.write(Yielded(loop, self._rows(batch, loop), states))

    def note_end(self, iterator: Any) -> None:
        """Record that a loader has no further batch."""
        self._end(vars(iterator)[_LOOP], vars(iterator)[_NUM_BATCHES], is_cut=False)

    def _end(self, loop: int, num_batches: int, *, is_cut: bool) -> None:
        self._observer.progress.leave(loop)
        self._observer.write(LoopEnd(loop, num_batches, is_cut))

    def observe_index(self, iterator: Any) -> Generator[None, Any, None]:
        """Observe the indices of a batch."""
        indices = yield
        if isinstance(indices, list) and all(isinstance(index, (int, np.integer)) for index in indices):
            # Workers receive their first batches before the iterator exists.
            self._observer.write(Batch(vars(iterator).get(_LOOP, self._last_loop), tuple(map(int, indices))))

    def _number_of(self, data: Any) -> int:
        known = next((number for number, one in enumerate(self._data_sets, 1) if one is data), 0)
        if not known:
            self._data_sets.append(data)
        return known or len(self._data_sets)


def install(observer: Observer) -> None:
    """Hook every loader that is iterated from now on."""
    loaders = Loaders(observer)
    is_over = observer.quiet("where loops can be cut", loaders.is_over, False)
    note_batch = observer.quiet("batches of loaders", loaders.note_batch)
    note_end = observer.quiet("ends of loaders", loaders.note_end)
    random_states = observer.quiet("random states", _random_states, ())

    def wrap_next(get_next: Any) -> Any:
        @functools.wraps(get_next)
        def observed(iterator: Any) -> Any:
            if is_over(iterator, sys._getframe(1)):
                raise loaders.end_of_cut(sys._getframe(1))
            before = random_states()
            try:
                batch = get_next(iterator)
            except StopIteration:
                note_end(iterator)
                raise
            note_batch(iterator, batch, before)
            return batch

        return observed

    replace(DataLoader, "__iter__", observer.around("loops over loaders", loaders.observe_iter))
    replace(_BaseDataLoaderIter, "__next__", wrap_next)
    replace(_BaseDataLoaderIter, "_next_index", observer.around("indices of samples", loaders.observe_index))


def _random_states() -> tuple[str, ...]:
    """Return digests of the states of the random generators of torch, NumPy and Python."""
    numpy = np.random.get_state(legacy=False)["state"]
    states = torch.get_rng_state().numpy(), np.append(numpy["key"], numpy["pos"]), np.array(random.getstate()[1])
    return tuple(map(digest, states))


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):  # a stream has none
        return None


def _sampler(loader: DataLoader) -> Sampler:
    """Return the sampler that decides on the indices, which torch's own batch sampler wraps."""
    is_given = loader.batch_size is None and loader.batch_sampler is not None
    sampler = loader.batch_sampler if is_given else loader.sampler
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    kind = type(sampler).__name__
    if isinstance(sampler, DistributedSampler):
        own = (sampler.num_replicas, sampler.rank, sampler.seed, sampler.epoch)
        return Sampler(kind, sampler.shuffle, *own)
    is_random = isinstance(sampler, RandomSampler)
    is_permutation = is_random and not sampler.replacement and sampler.num_samples == _length(sampler.data_source)
    has_epochs = hasattr(sampler, "set_epoch") and bool(getattr(sampler, "shuffle", True))
    return Sampler(kind, is_random or has_epochs, reads_all=is_permutation or isinstance(sampler, SequentialSampler))


def held(data: Any) -> Held | None:
    """Return digests of a data set; None without a length, or if samples are mere random numbers.

    Each sample is read from the same random state, so that random augmentation changes it alike on all ranks.
    """
    return values.held(_length(data) or 0, functools.partial(_digest_of, data))


def _digest_of(data: Any, placement: int) -> str:
    # torch.manual_seed also formats a stack for each kind of device that is not in use yet (torch 2.14).
    for seed in (random.seed, np.random.seed, torch.default_generator.manual_seed):
        seed(0)
    parts = [part.tobytes() for part in _arrays(data[placement])]
    return digest(np.frombuffer(b"".join(parts), np.uint8))


def _arrays(sample: Any) -> Iterator[np.ndarray]:
    """Yield the tensors, images and numbers of a sample as arrays."""
    if isinstance(sample, Mapping):
        sample = tuple(sample.values())
    if isinstance(sample, (list, tuple)):
        for part in sample:
            yield from _arrays(part)
    else:
        yield bytes_of(sample) if isinstance(sample, torch.Tensor) else np.asarray(sample)
