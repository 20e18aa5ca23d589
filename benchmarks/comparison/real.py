"""Train as a trainer does, and write down what each epoch took on each rank: what `allstep compare` launches.

horovodrun -np 2 python -m allstep.benchmarks.comparison.real --framework pytorch --output FILE [trainer's flags]
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from allstep.benchmarks.comparison import rank, turns
from allstep.common.config.flags import Parser
from allstep.common.hooks import Hook
from allstep.common.process.exit import run_rank
from allstep.common.reporting.base import Reporter


class Recorder(Reporter):
    """Keeps what the engine tells of each epoch, on every rank, and prints nothing."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, Any]] = []

    def event(self, name: str, **fields: Any) -> None:
        if name == "epoch":
            self.epochs.append(fields)


class TurnAfterEpoch(Hook):
    """Waits for this job's turn after each epoch."""

    def __init__(self, wait_for_turn: Callable[[], None]) -> None:
        self._wait_for_turn = wait_for_turn

    def on_epoch(self, session: object) -> None:
        self._wait_for_turn()


def main() -> None:
    parser = Parser("python -m allstep.benchmarks.comparison.real", __doc__)
    rank.add_flags(parser)
    flags, of_trainer = parser.parse_known_args(sys.argv[1:])
    session, recorder = rank.open_session(flags.framework, of_trainer), Recorder()
    if session is None:
        return
    worker = session.worker
    wait_for_turn = turns.join(flags.turns, worker.collectives.world_size)
    wait_for_turn()
    hooks = [TurnAfterEpoch(wait_for_turn)]
    dataclasses.replace(session, hooks=hooks, open_reporter=lambda *_: recorder).train()
    of_ranks = rank.seconds_by_rank([epoch["epoch_seconds"] for epoch in recorder.epochs], worker.collectives)
    # The first epoch warms up.
    num_images = len(session.dataset.train)
    blocks = [{"num_images": num_images, "seconds_by_rank": of_epoch} for of_epoch in of_ranks[1:]]
    epochs = [_told(epoch) for epoch in recorder.epochs]
    rank.write(flags, session.place.rank, worker, {"first_step_at": None, "blocks": blocks, "epochs": epochs})


def _told(epoch: dict[str, Any]) -> dict[str, Any]:
    told = {name: epoch[name] for name in ("epoch", "train_loss", "validation_loss", "validation_accuracy")}
    return {**told, "seconds": epoch["cumulative_seconds"]}


if __name__ == "__main__":
    run_rank(main)
