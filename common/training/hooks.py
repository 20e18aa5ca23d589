"""User callbacks invoked by the training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allstep.common.training.training_run import TrainingRun


class StopTraining(Exception):
    """Exception that a hook raises on every rank at the same step to save and end the run, as after its last step."""


class Hook:
    """Base class of callbacks, which the training loop calls on every rank; a subclass overrides what it needs.

    Any exception other than `StopTraining` stops the job, as a failed step does.
    """

    def on_start(self, session: TrainingRun) -> None:
        """Run before the first step; weights and progress are those from which training starts."""

    def on_step(self, session: TrainingRun) -> None:
        """Run after each step, which a GPU may still be computing; `session.progress` has its number."""

    def on_epoch(self, session: TrainingRun) -> None:
        """Run after an epoch has been validated, reported and saved."""

    def on_save(self, session: TrainingRun) -> None:
        """Run after the state has been copied for a checkpoint, which rank 0 may still be writing."""

    def on_end(self, session: TrainingRun) -> None:
        """Run after the last step, when the schedule is done, or when the ranks were asked to stop and have saved."""


class Check(Hook):
    """Hook that may refuse a run before it touches the files of an earlier one."""

    def check(self, session: TrainingRun) -> None:
        """Look at a run whose progress is that from which it starts. Raises UserError to refuse it."""
        raise NotImplementedError
