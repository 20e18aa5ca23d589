"""Results of trying a user's network before training, and the passes that they rule out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.base.terminal import warn
from allstep.common.training.hooks import Hook

if TYPE_CHECKING:
    from allstep.common.training.training_run import TrainingRun

TRIAL = "allstep_trial"
"""Attribute of a network that holds its trial."""


@dataclass(frozen=True, kw_only=True)
class Trial(Hook):
    """Hook that refuses passes which such a network cannot take, and tells that it ends in a softmax."""

    sets: str | None
    """Weight that the first samples set, as activation norms do."""
    counts: str | None
    """Entry of the network's state that changes in each pass in training, whatever the samples are."""
    ends_in_softmax: bool

    def on_start(self, session: TrainingRun) -> None:
        """Check the passes of a step.

        Raises:
            UserError: parts of a batch would set a weight, or there are several passes where passes are counted.
        """
        config, placement = session.config, session.placement
        num_parts = config.parallel.num_slices or placement.world_size * config.parallel.accumulate_steps
        if self.sets and num_parts > 1 and not session.progress.step:
            raise UserError(
                f"--model {config.model} sets {self.sets} from its first samples, of which each rank or pass would see "
                "a part; begin in one process without --accumulate-steps and --slices, and go on from there by --resume"
            )
        if self.counts and num_parts > placement.world_size:
            raise UserError(
                f"--model {config.model} changes {self.counts} in each pass, of which --accumulate-steps and --slices "
                "take several a step; leave them out"
            )
        if self.ends_in_softmax and session.dataset.task == "classification" and placement.rank == 0:
            warn(
                f"--model {config.model} seems to end in a softmax: its outputs add up to 1, where the loss expects "
                "logits; leave the softmax out"
            )


def are_probabilities(outputs: np.ndarray) -> bool:
    """Return whether rows of `outputs` are non-negative and add up to 1, as after a softmax."""
    if outputs.ndim < 2 or outputs.shape[-1] < 2:
        return False
    return bool((outputs >= 0).all() and (np.abs(outputs.sum(-1) - 1) < 1e-4).all())
