"""Trial of a user's network before training: what a pass changes by itself, and the runs that this rules out.

State that a pass in training changes without an optimizer are counters, flags, averages, codebooks. What depends on the
samples of the pass can be the same as in one process only where one pass has the whole batch; running statistics alone
are averaged over ranks. What does not depend on them is the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from allstep.common.base.errors import UserError, warn
from allstep.common.catalog.losses import LOSSES
from allstep.common.training.hooks import Check

if TYPE_CHECKING:
    from allstep.common.config.train_config import TrainConfig
    from allstep.common.training.training_run import TrainingRun

TRIAL = "allstep_trial"
"""Attribute of a network that holds the result of its trial."""
FACTORS = (1, 2)
"""Factors of the losses of two passes whose gradients are compared; they have the same rounding errors in any type."""


@dataclass(frozen=True, kw_only=True)
class PassState:
    """Names of what a pass changes, and how it uses samples."""

    repeated: frozenset[str] = frozenset()
    """Names of what changes alike in each pass, whatever its samples are."""
    sampled: tuple[str, ...] = ()
    """Names of what depends on the samples or on random numbers of each pass, without running statistics."""
    started: tuple[str, ...] = ()
    """Names of what depends on the samples of the first pass alone."""
    forgotten: tuple[str, ...] = ()
    """Names of what checkpoints lack."""
    remembers: bool = False
    """Whether the outputs of the next pass depend on what checkpoints lack."""
    couples: bool = False
    """Whether outputs of a sample, or losses of layers, depend on the other samples otherwise than by batch norm."""
    bends: bool = False
    """Whether gradients do not add up over parts of a batch, as with hooks that clamp them."""
    hooked: str | None = None
    """Name of a weight whose gradient the user's hooks see or change."""
    adds: bool = False
    """Whether layers add to the loss what may depend on samples."""
    ends_in_softmax: bool = False
    resized: frozenset[str] = frozenset()
    """Names of what has another shape after a pass."""


class Snapshot(Protocol):
    """State of a network at a moment."""

    def changes(self) -> set[str]:
        """Return the names of what has changed since."""
        ...

    def restore(self, *, without: Collection[str] = ()) -> None:
        """Put the state back, except for the names of `without`."""
        ...

    def next(self, changed: Collection[str]) -> Snapshot:
        """Return a snapshot of the state now, which differs in the names of `changed`."""
        ...


def try_passes(
    run: Callable[[int, int], Any],
    before: Snapshot,
    *,
    averaged: Callable[[], set[str]],
    forgotten: Callable[[set[str]], set[str]],
    may_couple: bool,
    may_hide: bool = False,
) -> tuple[Any, PassState]:
    """Run a network in training and look at what passes change; its state is another one afterwards.

    The result is the outputs of the first pass, and what was found.

    Args:
        run: makes a pass on the samples of that number of `variants_of`, with random numbers of that seed; returns the
            outputs as an array, or as something else that cannot be compared.
        before: a snapshot of the network.
        averaged: returns the names of running statistics.
        forgotten: returns those of some names that checkpoints lack.
        may_couple: whether to look at whether the outputs of a sample depend on the others.
        may_hide: whether to look at whether the same pass has other outputs though the snapshot is put back.

    Returns: the outputs of the first pass, and what was found.
    """
    outputs = run(0, 0)
    changes, after = before.changes(), before
    changed, sampled, each, couples = changes - averaged(), set[str](), set[str](), False
    if changed or may_couple:
        after = before.next(changes)
        before.restore()
        again = run(1, 0)
        sampled = after.changes() - averaged()
        couples = may_couple and not _same(outputs, again, slice(1, None, 2))
        if may_couple and not couples:
            before.restore()
            alike = run(2, 0)
            sampled |= after.changes() - averaged()
            couples = not _same(outputs, alike, slice(-1, None))
            # State that counts samples, or from which a generator of the network's own draws for each.
            has_equal_rows = _has_equal_rows(alike)
            if not couples and (changed - sampled or has_equal_rows):
                whole = before.next(before.changes())
                before.restore()
                fewer = run(3, 0)
                sampled |= whole.changes() - averaged()
                couples = has_equal_rows and not sampled and _depends_on_number(alike, fewer)
            # Other random numbers would make them differ, but not those of such a generator.
            if not (couples or sampled or has_equal_rows):
                before.restore()
                couples = _same(alike, run(2, 1), slice(None))
    if sampled:
        again = before.next(before.changes())
        run(0, 0)
        each = again.changes() & sampled
    repeated, lacking, remembers = changed - sampled, forgotten(changed | sampled), False
    if lacking:
        before.restore(without=lacking)
        remembers = not _same(outputs, run(0, 0), slice(None))
    if lacking and not remembers:
        sampled -= lacking
        anew = lacking - after.changes()  # by each pass, such as an auxiliary loss or masked weights
        lacking, repeated = lacking - anew, repeated - anew
    # What code alone can reach would also have changed the outputs of the samples that stayed.
    if may_hide and not remembers and (couples or not may_couple):
        before.restore()
        if remembers := not _same(outputs, run(0, 0), slice(None)):
            lacking = {_HIDDEN}
    return outputs, PassState(
        repeated=frozenset(repeated),
        sampled=tuple(sorted(each & sampled)),
        started=tuple(sorted(sampled - each)),
        forgotten=tuple(sorted(lacking)),
        remembers=remembers,
        couples=couples,
    )


_HIDDEN = "something that its code alone can reach"


def num_samples(shape: Sequence[int]) -> int:
    """Return how many samples of a shape a trial takes: few large ones, which cost time."""
    return 3 if math.prod(shape) > 4096 else 9


def variants_of(samples: np.ndarray, drawn: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return `samples`; them with every second one, from the first on, replaced by another one; as many copies of the
    last one; and two thirds of these.

    Copies of one sample take the same way, such as to one expert, which may have room for a few.
    """
    others, alike = samples.copy(), samples.copy()
    others[::2] = drawn[::2]
    if drawn.dtype.kind == "f":
        others[::2] *= 3  # a sample that depends on them changes by more than rounding
    alike[:] = samples[-1]
    return samples, others, alike, alike[len(alike) // 3 :]


def is_bent(gradients: Sequence[Any], others: Sequence[Any], *, times: float) -> bool:
    """Return whether gradients are other than that many times the first ones; None stands for no gradient."""
    # A bias that has no effect has rounding errors as its gradient, and so has a layer whose gradients vanish.
    largest = max((float(np.abs(one).max(initial=0)) for one in gradients if one is not None), default=0)
    rounding = max(1e-5 * largest, 1e-10)
    return any(
        not np.allclose(
            times * one, other, rtol=1e-3, atol=1e-3 * np.abs(one).max(initial=0) + rounding, equal_nan=True
        )
        for one, other in zip(gradients, others, strict=True)
        if one is not None and other is not None
    )


def has_parts(config: TrainConfig) -> bool:
    """Return whether a batch may be computed in parts, by ranks, devices or passes."""
    return config.strategy != "single" or config.parallel.accumulate_steps > 1 or bool(config.parallel.slices)


def num_parts(session: TrainingRun) -> int:
    """Return how many parts a batch is computed in."""
    parallel = session.config.parallel
    num_devices = session.placement.world_size * session.strategy.num_local_devices
    return parallel.num_slices or num_devices * parallel.accumulate_steps


def _same(outputs: Any, others: Any, samples: slice) -> bool:
    """Return whether the outputs of these samples are the same within rounding; true for what is no array."""
    if not isinstance(outputs, np.ndarray) or not isinstance(others, np.ndarray) or outputs.ndim == 0:
        return True
    if outputs.shape != others.shape:
        return False
    return np.allclose(outputs[samples], others[samples], rtol=1e-3, atol=1e-4, equal_nan=True)


def _has_equal_rows(outputs: Any) -> bool:
    """Return whether all samples have the same outputs; true for what is no array."""
    return not isinstance(outputs, np.ndarray) or _same(outputs, outputs[::-1], slice(None))


def _depends_on_number(outputs: Any, fewer: Any) -> bool:
    """Return whether equal samples have other outputs where there are fewer, beyond rounding errors of any type."""
    if not isinstance(outputs, np.ndarray) or not isinstance(fewer, np.ndarray) or not outputs.ndim or not fewer.ndim:
        return False
    one, other = outputs[0].astype(np.float32), fewer[0].astype(np.float32)
    tolerance = 0.05 * np.nan_to_num(np.abs(one)).max(initial=0)
    return one.shape != other.shape or not np.allclose(one, other, rtol=0, atol=tolerance, equal_nan=True)


class TrialCheck(Check):
    """Hook that refuses runs in which such a network would be trained otherwise than in one process."""

    def __init__(self, state: PassState, *, averaged: str, puts_back: bool, anew: Collection[str] = ()) -> None:
        """Take the result of a trial.

        Args:
            averaged: beginning of the names of state that is averaged over ranks.
            puts_back: whether each pass of a step begins with the state of the first.
            anew: names of state with which what is recomputed begins as the pass did.
        """
        self._state, self._averaged, self._puts_back, self._anew = state, averaged, puts_back, anew

    def check(self, session: TrainingRun) -> None:
        """Check passes and resuming.

        Raises UserError if parts of a batch would change a state that one pass changes by the whole batch, or a resumed
        run would begin with another state than the run before ended with.
        """
        config, placement, state = session.config, session.placement, self._state
        parts = num_parts(session)
        if parts > 1:
            self._check_parts(config.model, is_first=not session.progress.step)
        num_devices = placement.world_size * session.strategy.num_local_devices
        if state.repeated and parts > num_devices and (config.parallel.slices or not self._puts_back):
            flag = "--slices" if config.parallel.slices else "--accumulate-steps"
            raise UserError(
                f"--model {config.model} changes {min(state.repeated)} in each pass, of which {flag} takes several a "
                "step; leave it out"
            )
        if config.parallel.recompute:
            self._check_recomputed(config.model)
        if state.remembers and session.progress.step:
            raise UserError(
                f"--model {config.model} computes with {state.forgotten[0]}, which it changes in training and "
                f"checkpoints lack: a resumed run would not go on as the one before; keep it in {_KEPT}, or start "
                "again by --init-from"
            )
        if placement.rank == 0:
            takes_logits = session.dataset.task == "classification" and (config.loss or "cross-entropy") in LOSSES
            self._tell(config.model, parts, takes_logits=takes_logits)

    def _check_recomputed(self, model: str) -> None:
        state = self._state
        for name in sorted({*state.forgotten, *state.repeated, *state.sampled, *state.started}.difference(self._anew)):
            raise UserError(
                f"--model {model} changes {name} in each pass, which --recompute would do twice a pass; leave it out"
            )
        if state.adds:
            raise UserError(
                f"--model {model} has layers that add to the loss, whose gradients --recompute would lose; leave it out"
            )

    def _check_parts(self, model: str, *, is_first: bool) -> None:
        for name in self._state.sampled:
            raise UserError(
                f"--model {model} changes {name} by the samples of each pass, of which each rank or pass would see a "
                "part; train in one process without --accumulate-steps and --slices, or, if its mean over ranks will "
                f"do, make it a buffer whose name begins with {self._averaged}"
            )
        for name in self._state.started if is_first else ():
            raise UserError(
                f"--model {model} sets {name} from its first samples, of which each rank or pass would see a part; "
                "begin in one process without --accumulate-steps and --slices, and go on from there by --resume"
            )
        if self._state.couples:
            raise UserError(
                f"--model {model} computes the samples of a pass together, of which each rank or pass would have a "
                "part; train in one process without --accumulate-steps and --slices, or use the framework's own batch "
                "norm, with --sync-batch-norm"
            )
        if self._state.bends:
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
        if state.forgotten:
            refused = ", so that --resume will be refused" if state.remembers else ""
            warn(
                f"--model {model} changes {state.forgotten[0]} in training, which checkpoints lack{refused}; keep it "
                f"in {_KEPT}"
            )
        if state.hooked and parts > 1:
            warn(
                f"--model {model} has hooks for the gradient of {state.hooked}, which see that of each rank or pass, "
                "before they are averaged"
            )


_KEPT = "a buffer or in get_extra_state (PyTorch), or in a variable of Keras"


def are_probabilities(outputs: np.ndarray) -> bool:
    """Return whether rows of `outputs` are non-negative and add up to 1, as after a softmax."""
    if outputs.ndim < 2 or outputs.shape[-1] < 2:
        return False
    return bool((outputs >= 0).all() and (np.abs(outputs.sum(-1) - 1) < 1e-4).all())
