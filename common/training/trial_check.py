"""Refusals and warnings that follow from the trial of a network (`trial`)."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from allstep.common.base.errors import UserError, warn
from allstep.common.catalog.losses import LOSSES
from allstep.common.training.hooks import Check

if TYPE_CHECKING:
    from allstep.common.config.train_config import TrainConfig
    from allstep.common.training.training_run import TrainingRun
    from allstep.common.training.trial import PassState

_KEPT = "a buffer or in get_extra_state (PyTorch), or in a variable of Keras"


def has_parts(config: TrainConfig) -> bool:
    """Return whether a batch may be computed in parts, by ranks, devices or passes."""
    return config.strategy != "single" or config.parallel.accumulate_steps > 1 or bool(config.parallel.slices)


def num_parts(session: TrainingRun) -> int:
    """Return how many parts a batch is computed in."""
    parallel = session.config.parallel
    num_devices = session.placement.world_size * session.strategy.num_local_devices
    return parallel.num_slices or num_devices * parallel.accumulate_steps


class TrialCheck(Check):
    """Hook that refuses runs that would train a network otherwise than one process with the whole batch does."""

    def __init__(self, state: PassState, *, averaged: str, puts_back: bool, anew: Collection[str] = ()) -> None:
        """Keep the result of a trial.

        Args:
            averaged: prefix of the names of state that is averaged over ranks.
            puts_back: whether each pass of a step begins with the state of the first.
            anew: names of state that --recompute restores before it computes a part of a pass again.
        """
        self._state, self._averaged, self._puts_back, self._anew = state, averaged, puts_back, anew

    def check(self, session: TrainingRun) -> None:
        """Check the passes of a step, and resuming; on rank 0, also warn.

        Raises UserError if the parts of a batch would change a state otherwise than one pass over the whole batch, or a
        resumed run would begin with another state than the run before ended with.
        """
        config, placement, state = session.config, session.placement, self._state
        parts = num_parts(session)
        if parts > 1:
            self._check_parts(config.model, is_first=not session.progress.step)
        num_devices = placement.world_size * session.strategy.num_local_devices
        if state.constant_changes and parts > num_devices and (config.parallel.slices or not self._puts_back):
            flag = "--slices" if config.parallel.slices else "--accumulate-steps"
            raise UserError(
                f"--model {config.model} changes {min(state.constant_changes)} in each pass, of which {flag} takes "
                "several a step; leave it out"
            )
        if config.parallel.recompute:
            self._check_recomputed(config.model)
        if state.needs_unsaved and session.progress.step:
            raise UserError(
                f"--model {config.model} computes with {state.not_saved[0]}, which it changes in training and "
                f"checkpoints lack: a resumed run would not go on as the one before; keep it in {_KEPT}, or start "
                "again by --init-from"
            )
        if placement.rank == 0:
            takes_logits = session.dataset.task == "classification" and (config.loss or "cross-entropy") in LOSSES
            self._tell(config.model, parts, takes_logits=takes_logits)

    def _check_recomputed(self, model: str) -> None:
        state = self._state
        changed = {*state.not_saved, *state.constant_changes, *state.sample_dependent, *state.set_once}
        for name in sorted(changed.difference(self._anew)):
            raise UserError(
                f"--model {model} changes {name} in each pass, which --recompute would do twice a pass; leave it out"
            )
        if state.adds_losses:
            raise UserError(
                f"--model {model} has layers that add to the loss, whose gradients --recompute would lose; leave it out"
            )

    def _check_parts(self, model: str, *, is_first: bool) -> None:
        for name in self._state.sample_dependent:
            raise UserError(
                f"--model {model} changes {name} by the samples of each pass, of which each rank or pass would see a "
                "part; train in one process without --accumulate-steps and --slices, or, if its mean over ranks will "
                f"do, make it a buffer whose name begins with {self._averaged}"
            )
        for name in self._state.set_once if is_first else ():
            raise UserError(
                f"--model {model} sets {name} from its first samples, of which each rank or pass would see a part; "
                "begin in one process without --accumulate-steps and --slices, and go on from there by --resume"
            )
        if self._state.couples_samples:
            raise UserError(
                f"--model {model} computes outputs of a sample from other samples of its batch, of which each rank or "
                "pass would have a part; train in one process without --accumulate-steps and --slices, or use the "
                "framework's own batch norm, with --sync-batch-norm"
            )
        if self._state.has_nonlinear_gradients:
            raise UserError(
                f"--model {model} changes gradients by their size, as hooks do that clamp or normalise them, or by the "
                "other samples, as scale_grad_by_freq does, of which each rank or pass would have a part; train in one "
                "process without --accumulate-steps and --slices, or give --clip-norm"
            )

    def _tell(self, model: str, parts: int, *, takes_logits: bool) -> None:
        state = self._state
        if state.ends_in_softmax and takes_logits:
            warn(
                f"--model {model} seems to end in a softmax: its outputs add up to 1, where the loss expects logits; "
                "leave the softmax out"
            )
        if state.not_saved:
            refused = ", so that --resume will be refused" if state.needs_unsaved else ""
            warn(
                f"--model {model} changes {state.not_saved[0]} in training, which checkpoints lack{refused}; keep it "
                f"in {_KEPT}"
            )
        if state.hooked_weight and parts > 1:
            warn(
                f"--model {model} has hooks for the gradient of {state.hooked_weight}, which see that of each rank or "
                "pass, before they are averaged"
            )
