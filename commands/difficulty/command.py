"""Train briefly and write the loss of each training sample in the format that `--curriculum` reads:

    allstep difficulty --output difficulty.npy [--framework tensorflow] [flags of the trainer, as --epochs 2]
    python pytorch/train.py --curriculum difficulty.npy

Under a launcher, the ranks train together and each evaluates its share of the samples.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from allstep.commands.shared.records.files import output_file, written_whole
from allstep.common.base.flag_types import Parser, one_of
from allstep.common.catalog.strategies import FRAMEWORKS
from allstep.common.data.loader import Batch
from allstep.common.data.sharding import Position, rank_slice
from allstep.common.process.requirements import need_frameworks
from allstep.common.training.hooks import Hook
from allstep.common.training.start import start

if TYPE_CHECKING:
    from allstep.common.training.training_run import TrainingRun


class WriteLosses(Hook):
    """Hook that writes the loss of each training sample, on rank 0, at the end of a run."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_end(self, session: TrainingRun) -> None:
        split, collectives = session.dataset.train, session.worker.collectives
        losses = np.zeros(len(split))
        begin, end = rank_slice(0, len(split), rank=collectives.rank, world_size=collectives.world_size)
        # All ranks take the same number of steps, since each may hold weights that the others need.
        for index in range(begin, begin - (-len(split) // collectives.world_size)):
            inputs, targets = split.read(np.array([min(index, end - 1)]), epoch=0)
            losses[min(index, end - 1)], _ = session.worker.eval_step(Batch(inputs, targets, 1, 1, 1.0, Position(0, 0)))
        losses = collectives.all_reduce_sum(losses)
        if session.placement.rank == 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with written_whole(self._path) as stream:
                np.save(stream, losses)


def main(argv: Sequence[str] | None = None) -> None:
    """Train and write the file of losses."""
    parser = Parser("allstep difficulty", __doc__)
    parser.add_argument("--framework", type=one_of(*FRAMEWORKS), default=FRAMEWORKS[0], metavar="NAME")
    parser.add_argument("--output", type=output_file, required=True, metavar="FILE", help="an .npy file")
    flags, trainer_flags = parser.parse_known_args(argv)
    need_frameworks([flags.framework], by="allstep difficulty")
    train = importlib.import_module(f"allstep.{flags.framework}.train")
    if session := train.session(*start(train.strategies, trainer_flags), [WriteLosses(flags.output)]):
        session.train()
