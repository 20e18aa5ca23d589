"""Observes torch's DataLoader and its data set, and ends each loop when it has been seen enough.

The classes of its iterators begin with an underscore: looked up in torch 2.14.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from allstep.commands.prove.observer.observer import Observer, replace
from allstep.commands.prove.observer.pytorch_models import bytes_of
from allstep.commands.prove.observer.values import digest
from allstep.commands.prove.records import Batch, Held, Sampler

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
                sampler=_sampler(loader),
            )
            _current.append(loop.number)
            if observer.first_training_loop is None:
                data[loop.number] = loader.dataset
            iterator = make_iterator(loader)
            vars(iterator).update({_LOOP: loop.number, _NUM_BATCHES: 0})
            return iterator

        return observed

    def wrap_next(get_next: Any) -> Any:
        @functools.wraps(get_next)
        def observed(iterator: Any) -> Any:
            if vars(iterator)[_NUM_BATCHES] >= observer.max_batches:
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
    data: dict[int | None, Any] = {}
    observer.look_last(lambda: held(data.get(observer.first_training_loop)))
    replace(DataLoader, "__iter__", wrap_iter)
    replace(_BaseDataLoaderIter, "__next__", wrap_next)
    replace(_BaseDataLoaderIter, "_next_index", wrap_index)


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:  # a stream has none
        return None


def _sampler(loader: DataLoader) -> Sampler:
    """What decides on the indices: within a sampler of batches of torch's, the one that it was given."""
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
    return Sampler(kind, is_random, reads_all=is_permutation or isinstance(sampler, SequentialSampler))


def held(data: Any) -> Held | None:
    """What a data set holds in three places; None of one whose samples are nothing but random numbers.

    Each is read from the same random state, so that those which are changed at random are changed alike.
    """
    if (num_samples := _length(data)) is None:
        return None
    places = (0, num_samples // 2, num_samples - 1)
    digests = tuple(_digest_of(data, placement) for placement in places)
    return Held(digests) if len({*digests}) == len(places) else None


def _digest_of(data: Any, placement: int) -> str:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    parts = [part.tobytes() for part in _arrays(data[placement])]
    return digest(np.frombuffer(b"".join(parts), np.uint8))


def _arrays(sample: Any) -> Iterator[np.ndarray]:
    """Tensors, images and numbers of a sample."""
    if isinstance(sample, Mapping):
        sample = tuple(sample.values())
    if isinstance(sample, (list, tuple)):
        for part in sample:
            yield from _arrays(part)
    else:
        yield bytes_of(sample) if isinstance(sample, torch.Tensor) else np.asarray(sample)
