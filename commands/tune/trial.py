"""One trial of a search: train as a trainer does, report each epoch to the study, and stop if the trial is pruned.

Only rank 0 talks to the study; all ranks follow its answer. `allstep tune` launches this:

    horovodrun -np 2 python -m allstep.commands.tune.trial --framework pytorch --metric loss --study FILE --number N
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from allstep.commands.shared.rank import open_session
from allstep.commands.tune.study import DIRECTIONS, trial_of
from allstep.common.api.session import History
from allstep.common.base.flag_types import Parser, nonempty_path, one_of, whole
from allstep.common.catalog.strategies import FRAMEWORKS
from allstep.common.process.exit import run_rank
from allstep.common.training.hooks import Hook, StopTraining

if TYPE_CHECKING:
    from optuna.trial import Trial

    from allstep.common.training.training_run import TrainingRun


class Pruning(Hook):
    """Hook with which rank 0 reports each epoch to the study; if the trial is pruned, all ranks stop together."""

    def __init__(self, trial: Trial | None, value: Callable[[], float]) -> None:
        """Take the `trial`, None except on rank 0, and `value`, which returns the metric of the last epoch."""
        self._trial, self._value = trial, value
        self.is_pruned = False

    def on_epoch(self, session: TrainingRun) -> None:
        wanted = 0.0
        if self._trial is not None:
            self._trial.report(self._value(), session.progress.position.epoch)
            wanted = float(self._trial.should_prune())
        [stops] = session.worker.collectives.all_reduce_sum(np.array([wanted]))
        if stops:
            self.is_pruned = True
            raise StopTraining


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("python -m allstep.commands.tune.trial", __doc__)
    parser.add_argument("--framework", type=one_of(*FRAMEWORKS), required=True)
    parser.add_argument("--study", type=nonempty_path, required=True)
    parser.add_argument("--number", type=whole(0, 10**9), required=True)
    parser.add_argument("--metric", type=one_of(*DIRECTIONS), required=True)
    flags, trainer_flags = parser.parse_known_args(argv)
    session = open_session(flags.framework, trainer_flags)
    if session is None:
        return
    trial = trial_of(flags.study, flags.number) if session.placement.rank == 0 else None
    history = History()

    def value() -> float:
        return history.epochs[-1][f"validation_{flags.metric}"]

    pruning = Pruning(trial, value)
    dataclasses.replace(session, hooks=[pruning], open_reporter=lambda *_: history).train()
    if trial is not None:
        trial.set_user_attr("is_pruned", pruning.is_pruned)
        trial.set_user_attr("value", value())


if __name__ == "__main__":
    run_rank(main)
