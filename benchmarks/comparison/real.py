"""Train as a trainer does, and write down what each epoch took on each rank: what `allstep compare` launches.

horovodrun -np 2 python -m allstep.benchmarks.comparison.real --framework pytorch --output FILE [trainer's flags]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from allstep.benchmarks.comparison import rank, turns
from allstep.common import run
from allstep.common.config import TrainConfig
from allstep.common.datasets import Dataset
from allstep.common.ending import run_rank
from allstep.common.flags import Parser
from allstep.common.launcher import Placement
from allstep.common.reporting.base import Reporter
from allstep.common.worker import Worker


class Recorder(Reporter):
    """Keeps what the engine tells of each epoch, on every rank, and waits for its turn after each."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, Any]] = []
        self.wait_for_turn: Callable[[], None] = lambda: None

    def event(self, name: str, **fields: Any) -> None:
        if name == "epoch":
            self.epochs.append(fields)
            self.wait_for_turn()


def main() -> None:
    parser = Parser("python -m allstep.benchmarks.comparison.real", __doc__)
    rank.add_flags(parser)
    flags, of_trainer = parser.parse_known_args(sys.argv[1:])
    recorder, train = Recorder(), run.train
    run.open_reporter = lambda *_: recorder

    def measure(worker: Worker, dataset: Dataset, config: TrainConfig, place: Placement, **options: Any) -> None:
        recorder.wait_for_turn = turns.join(flags.turns, worker.collectives.world_size)
        recorder.wait_for_turn()
        train(worker, dataset, config, place, **options)
        seconds = [epoch["epoch_seconds"] for epoch in recorder.epochs]
        of_ranks = rank.seconds_by_rank(seconds, worker.collectives)
        num_images = len(dataset.train)
        # The first epoch warms up.
        blocks = [{"num_images": num_images, "seconds_by_rank": of_epoch} for of_epoch in of_ranks[1:]]
        rank.write(
            flags,
            place.rank,
            worker,
            {"first_step_at": None, "blocks": blocks, "epochs": [_told(epoch) for epoch in recorder.epochs]},
        )

    rank.run_trainer(flags.framework, of_trainer, measure)


def _told(epoch: dict[str, Any]) -> dict[str, Any]:
    told = {name: epoch[name] for name in ("epoch", "train_loss", "validation_loss", "validation_accuracy")}
    return {**told, "seconds": epoch["cumulative_seconds"]}


if __name__ == "__main__":
    run_rank(main)
