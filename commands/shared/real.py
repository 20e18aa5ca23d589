"""Train as a trainer does, and write how long each epoch took on each rank; `allstep compare` launches this.

horovodrun -np 2 python -m allstep.commands.shared.real --framework pytorch --output FILE [trainer's flags]
"""

import dataclasses
from collections.abc import Callable, Sequence

from allstep.commands.shared import rank, turns
from allstep.commands.shared.records.measured import EpochResult
from allstep.common.api.session import History
from allstep.common.base.flag_types import Parser
from allstep.common.process.exit import run_rank
from allstep.common.training.hooks import Hook

_CURVE = ("epoch", "train_loss", "validation_loss", "validation_accuracy", "cumulative_seconds")


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
    session, history = rank.open_session(flags.framework, trainer_flags), History()
    if session is None:
        return
    worker = session.worker
    wait_for_turn = turns.join(flags.turns, worker.collectives.world_size)
    wait_for_turn()
    hooks = [TurnAfterEpoch(wait_for_turn)]
    dataclasses.replace(session, hooks=hooks, open_reporter=lambda *_: history).train()
    # The first epoch warms up.
    seconds = [epoch["epoch_seconds"] for epoch in history.epochs[1:]]
    blocks = rank.blocks(seconds, len(session.dataset.train), worker.collectives)
    epochs = tuple(EpochResult(*(epoch[name] for name in _CURVE)) for epoch in history.epochs)
    rank.write(flags, session.placement.rank, worker, blocks, epochs=epochs)


if __name__ == "__main__":
    run_rank(main)
