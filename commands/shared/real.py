"""Train as a trainer does, and write how long each epoch took on each rank; `allstep compare` launches this.

horovodrun -np 2 python -m allstep.commands.shared.real --framework pytorch --output FILE [trainer's flags]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from allstep.commands.shared import rank, turns
from allstep.commands.shared.records.measured import EpochResult
from allstep.common.base.flag_types import Parser
from allstep.common.process.exit import run_rank
from allstep.common.reporting.base import Reporter
from allstep.common.training.hooks import Hook


class Recorder(Reporter):
    """Keeps what the engine reports of each epoch, on every rank, and prints nothing."""

    def __init__(self) -> None:
        self.epochs: list[EpochResult] = []
        self.seconds: list[float] = []
        """Duration of each epoch."""

    def event(self, name: str, **fields: Any) -> None:
        if name == "epoch":
            curve = ("epoch", "train_loss", "validation_loss", "validation_accuracy")
            self.epochs.append(EpochResult(*map(fields.__getitem__, curve), seconds=fields["cumulative_seconds"]))
            self.seconds.append(fields["epoch_seconds"])


class TurnAfterEpoch(Hook):
    """Waits for this job's turn after each epoch."""

    def __init__(self, wait_for_turn: Callable[[], None]) -> None:
        self._wait_for_turn = wait_for_turn

    def on_epoch(self, session: object) -> None:
        self._wait_for_turn()


def main(argv: Sequence[str] | None = None) -> None:
    """Train and write what was measured."""
    parser = Parser("python -m allstep.commands.shared.real", __doc__)
    rank.add_flags(parser)
    flags, trainer_flags = parser.parse_known_args(argv)
    session, recorder = rank.open_session(flags.framework, trainer_flags), Recorder()
    if session is None:
        return
    worker = session.worker
    wait_for_turn = turns.join(flags.turns, worker.collectives.world_size)
    wait_for_turn()
    hooks = [TurnAfterEpoch(wait_for_turn)]
    dataclasses.replace(session, hooks=hooks, open_reporter=lambda *_: recorder).train()
    # The first epoch warms up.
    blocks = rank.blocks(recorder.seconds[1:], len(session.dataset.train), worker.collectives)
    rank.write(flags, session.placement.rank, worker, blocks, epochs=tuple(recorder.epochs))


if __name__ == "__main__":
    run_rank(main)
