"""Ranks in threads of this process that train a `NumpyWorker` by the loop of both frameworks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy_worker import NumpyWorker
from ranks import events

from allstep.common.base.collectives import OneRank
from allstep.common.cli.command_line import parse
from allstep.common.config.train_config import TrainConfig
from allstep.common.launch.placement import ALONE, Placement
from allstep.common.training.hooks import Hook
from allstep.common.training.opening import open_dataset
from allstep.common.training.same_on_ranks import resolve_auto
from allstep.common.training.training_run import TrainingRun

# 226 samples of 64 pixels, and 37 for validation: 4 global batches of 59, of which the last has 49.
DATA = ("--dataset", "synthetic", "--synthetic-samples", 226, "--synthetic-shape", 8, 8, 1)
FLAGS = (*DATA, "--global-batch-size", 59, "--base-lr", 0.05)


class Group:
    """Meeting point of ranks in threads."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=30)
        self.values: list[Any] = [None] * world_size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


class ThreadCollectives:
    """Collectives of a rank in a thread; implements `allstep.common.base.collectives.Collectives`."""

    def __init__(self, group: Group, rank: int, world_size: int) -> None:
        self._group, self.rank, self.world_size = group, rank, world_size

    def all_reduce_sum(self, values: np.ndarray) -> np.ndarray:
        return np.sum(self._group.exchange(self.rank, values.copy()), axis=0)

    def all_gather(self, values: np.ndarray) -> np.ndarray:
        return np.stack(self._group.exchange(self.rank, values.copy()))

    def broadcast_arrays(self, arrays: Mapping[str, np.ndarray], root: int = 0) -> dict[str, np.ndarray]:
        own = {name: array.copy() for name, array in arrays.items()} if self.rank == root else None
        return {name: array.copy() for name, array in self._group.exchange(self.rank, own)[root].items()}

    def barrier(self) -> None:
        self._group.barrier.wait()


@dataclasses.dataclass
class NumpyStrategy:
    """Strategy of ranks in threads."""

    placement: Placement
    collectives: Any
    gpu: int | None = None
    steps_in_flight: int = 1

    def metrics(self) -> dict[str, float]:
        return {}


class Job:
    """Job of ranks in threads; the last one's runs stay for tests to look at."""

    def __init__(
        self,
        num_ranks: int = 1,
        *flags: object,
        hooks: Callable[[Job, int], Sequence[Hook]] = lambda job, rank: (),
        prepare: Callable[[TrainingRun], TrainingRun] = lambda run: run,
    ) -> None:
        """Parse the flags as a trainer does.

        Args:
            hooks: returns the hooks of a rank.
            prepare: changes the run of each rank before it trains.
        """
        self.num_ranks = num_ranks
        self.config = _parsed(*map(str, (*FLAGS, *flags)))
        self.hooks, self.prepare = hooks, prepare
        self.group = Group(num_ranks)
        self._progress_states: dict[int, Any] = {}

    def build(self, rank: int) -> TrainingRun:
        """Return the run of a rank, ready to train."""
        size = self.num_ranks
        placement = dataclasses.replace(ALONE, rank=rank, world_size=size, local_rank=rank, local_size=size)
        collectives = ThreadCollectives(self.group, rank, size) if size > 1 else OneRank()
        config = resolve_auto(self.config, collectives)
        dataset = open_dataset(config, placement, None, gpu=None, collectives=collectives)
        worker = NumpyWorker(config, dataset, collectives)
        strategy = NumpyStrategy(placement, collectives)
        run = TrainingRun(worker, dataset, config, strategy, self.hooks(self, rank), watching=self.watching)
        return self.prepare(run)

    def train(self) -> list[dict]:
        """Train on all ranks; return the events of metrics.jsonl, none without an output directory.

        Raises: the error of the first rank that failed by itself.
        """
        self.runs: list[TrainingRun | None] = [None] * self.num_ranks

        def train_rank(rank: int) -> BaseException | None:
            try:
                self.runs[rank] = self.build(rank)
                self.runs[rank].train()
            except BaseException as error:
                self.group.barrier.abort()
                return error
            return None

        with ThreadPoolExecutor(self.num_ranks) as pool:
            errors = [error for error in pool.map(train_rank, range(self.num_ranks)) if error]
        own = [error for error in errors if not isinstance(error.__cause__ or error, threading.BrokenBarrierError)]
        if errors:
            raise (own or errors)[0]
        return events(self.config.output.output_dir) if self.config.output.output_dir else []

    @contextlib.contextmanager
    def watching(
        self, collectives: object, placement: Placement, progress_state: Any, *_: object, **__: object
    ) -> Iterator[Callable[[str], None]]:
        """Register the rank, for `ask_to_stop`; threads of one process need no watchdog."""
        self._progress_states[placement.rank] = progress_state
        self.group.barrier.wait()
        yield self.ask_to_stop

    def ask_to_stop(self, notice: str) -> None:
        """Have all ranks stop at the same point, by the protocol of `ProgressState`."""
        states = self._progress_states.values()
        last_tick = max(1, *[state.freeze() for state in states])
        for state in states:
            state.decide(last_tick, notice)


def _parsed(*words: str) -> TrainConfig:
    """Parse flags, those of equal runs in different output directories once."""
    if "--output-dir" not in words:
        return _parsed_once(*words)
    index = words.index("--output-dir") + 1
    config = _parsed_once(*words[:index], "run", *words[index + 1 :])
    return dataclasses.replace(config, output=dataclasses.replace(config.output, output_dir=Path(words[index])))


@functools.cache
def _parsed_once(*words: str) -> TrainConfig:
    return parse(("single", "horovod"), ALONE, words)


def train(num_ranks: int, output_dir: Path, *flags: object, **options: Any) -> list[dict]:
    """Train and return the events of metrics.jsonl."""
    return Job(num_ranks, "--output-dir", output_dir, "--log-every", 1, *flags, **options).train()


def of(name: str, found: Sequence[dict], field: str) -> list[Any]:
    """Return a field of all events with this name."""
    return [event[field] for event in found if event["event"] == name]


def changed_worker(**methods):
    """Return what replaces a run's worker by one of a subclass with these methods."""

    def prepare(run):
        run.worker.__class__ = type("Changed", (NumpyWorker,), methods)
        return run

    return prepare


def on_rank(number: int, prepare):
    return lambda run: prepare(run) if run.placement.rank == number else run
