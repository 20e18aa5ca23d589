"""Functions of a user's that the training loop calls at given moments of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allstep.common.session import Session


class StopTraining(Exception):
    """A hook raises it on every rank at the same moment: the run ends there in order, as after its last step."""


class Hook:
    """Called on every rank, in the training loop; a subclass overrides the moments that it needs.

    Any other exception than `StopTraining` stops the job, as a failed step does.
    """

    def on_start(self, session: Session) -> None:
        """Before the first step; weights and progress are those that training goes on from."""

    def on_step(self, session: Session) -> None:
        """After each step, which a GPU may still be computing; `session.progress` has its number."""

    def on_epoch(self, session: Session) -> None:
        """After each epoch was validated, reported and saved."""

    def on_save(self, session: Session) -> None:
        """After the state was copied for a checkpoint, which rank 0 may still be writing."""

    def on_end(self, session: Session) -> None:
        """After the last step: the schedule is through, or the ranks were asked to stop and have saved."""
