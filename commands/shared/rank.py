"""The parts of a measured rank besides training: start as a trainer does, gather from all ranks, write a file.

The session is the trainer's own, so strategy, worker and launcher are the ones that train.
"""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from allstep.commands.shared import machine
from allstep.commands.shared.records.files import output_file, write_json
from allstep.commands.shared.records.measured import Block, EpochResult, Measured
from allstep.common.base.collectives import Collectives
from allstep.common.base.flag_types import nonempty_path
from allstep.common.catalog.strategies import FRAMEWORKS, STRATEGIES
from allstep.common.process.installation import loaded_libraries
from allstep.common.training.start import start
from allstep.common.training.worker import Worker

if TYPE_CHECKING:
    from allstep.common.training.training_run import TrainingRun


_UNKNOWN = -1  # stands for unknown joules among the integers that ranks exchange


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a measured rank; all other flags are the trainer's."""
    parser.add_argument("--framework", choices=FRAMEWORKS, default=FRAMEWORKS[0])
    parser.add_argument("--output", type=output_file, metavar="FILE", help="write what was measured as JSON")
    turns = "wait on this socket for turns from allstep compare"
    parser.add_argument("--turns", type=nonempty_path, metavar="SOCKET", help=turns)


def open_session(framework: str, arguments: Sequence[str]) -> TrainingRun | None:
    """Return the session of a framework's trainer; None in a process that only served other ranks."""
    train = importlib.import_module(f"allstep.{framework}.train")
    return train.session(*start(train.strategies, arguments))


def by_rank(values: Sequence[int], collectives: Collectives) -> np.ndarray:
    """Gather integers of every rank, (ranks, values); only this rank's if one process acts for all ranks."""
    own = np.array(values, np.int64)
    return collectives.all_gather(own) if collectives.world_size > 1 else own[np.newaxis]


def energy_counter(session: TrainingRun) -> Callable[[], float]:
    """Return a function that returns the joules this rank's GPU has taken so far; NaN if that is unknown."""
    strategy = STRATEGIES[session.worker.framework][session.config.strategy_name]
    takes_many = strategy.one_process and {"num_gpus", "num_devices"} & set(strategy.flags)
    gpu = session.strategy.gpu
    counter = None if gpu is None or takes_many else machine.energy_counter(gpu)
    return counter or (lambda: math.nan)


def blocks(
    seconds: Sequence[float], num_images: int, collectives: Collectives, *, joules: Sequence[float] | None = None
) -> tuple[Block, ...]:
    """Return blocks of `num_images` images each, with the seconds of every rank and the joules of all ranks.

    `joules` is the energy of this rank's GPU in each block; NaN if unknown.
    """
    nanoseconds = by_rank([round(one * 1e9) for one in seconds], collectives)
    own = joules or [math.nan] * len(seconds)
    millijoules = by_rank([_UNKNOWN if math.isnan(one) else round(one * 1e3) for one in own], collectives)
    return tuple(
        Block(num_images, tuple(times), None if _UNKNOWN in energies else sum(energies) / 1e3)
        for times, energies in zip((nanoseconds.T / 1e9).tolist(), millijoules.T.tolist(), strict=True)
    )


def write(
    flags: argparse.Namespace,
    rank: int,
    worker: Worker,
    blocks: tuple[Block, ...],
    *,
    first_step_at: float | None = None,
    epochs: tuple[EpochResult, ...] | None = None,
) -> None:
    """Gather the peak memory of each rank, and write it with the measurements from rank 0 if --output is given."""
    memory = by_rank([worker.peak_memory_bytes()], worker.collectives)
    if flags.output and rank == 0:
        libraries = {name: tuple(paths) for name, paths in loaded_libraries().items()}
        measured = Measured(blocks, tuple(memory.ravel().tolist()), first_step_at, epochs, libraries)
        write_json(flags.output, measured)
