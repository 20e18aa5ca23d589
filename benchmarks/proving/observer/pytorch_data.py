"""Observes torch's DataLoader, and ends each loop when it has been seen enough.

The classes of its iterators begin with an underscore: looked up in torch 2.14.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from allstep.benchmarks.proving.observer.observer import Observer, replace
from allstep.benchmarks.proving.records import Batch, Sampler

_LOOP, _NUM_BATCHES = "_allstep_loop", "_allstep_num_batches"


def install(observer: Observer) -> None:
    """Hook every loader that is iterated from now on."""

    def wrap_iter(make_iterator: Any) -> Any:
        @functools.wraps(make_iterator)
        def observed(loader: DataLoader) -> Any:
            loop = observer.begin_loop(
                _length(loader),
                batch_size=loader.batch_size,
                num_samples=_length(loader.dataset),
                sampler=_sampler(loader.sampler),
            )
            _current.append(loop.number)
            iterator = make_iterator(loader)
            vars(iterator).update({_LOOP: loop.number, _NUM_BATCHES: 0})
            return iterator

        return observed

    def wrap_next(get_next: Any) -> Any:
        @functools.wraps(get_next)
        def observed(iterator: Any) -> Any:
            if vars(iterator)[_NUM_BATCHES] >= observer.most_batches:
                raise StopIteration
            vars(iterator)[_NUM_BATCHES] += 1
            return get_next(iterator)

        return observed

    def wrap_index(get_indices: Any) -> Any:
        @functools.wraps(get_indices)
        def observed(iterator: Any) -> Any:
            indices = get_indices(iterator)
            if isinstance(indices, list) and all(isinstance(index, int) for index in indices):
                # Workers are given their first batches before the iterator is there.
                observer.write(Batch(vars(iterator).get(_LOOP, _current[-1]), tuple(indices)))
            return indices

        return observed

    _current: list[int] = []
    replace(DataLoader, "__iter__", wrap_iter)
    replace(_BaseDataLoaderIter, "__next__", wrap_next)
    replace(_BaseDataLoaderIter, "_next_index", wrap_index)


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:  # a stream has none
        return None


def _sampler(sampler: Any) -> Sampler:
    kind = type(sampler).__name__
    if isinstance(sampler, DistributedSampler):
        own = (sampler.num_replicas, sampler.rank, sampler.seed, sampler.epoch)
        return Sampler(kind, sampler.shuffle, *own)
    return Sampler(kind, isinstance(sampler, RandomSampler))
