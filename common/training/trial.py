"""Trial of a user's network before training: what passes change besides weights, and how outputs depend on samples.

A pass in training changes state without an optimizer: counters, flags, averages, codebooks. A value that depends on the
samples equals that of one process only if one pass has the whole batch, except for running statistics, which are
averaged over ranks. Any other value is the same on all ranks. `trial_check` refuses the runs that would differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

TRIAL = "allstep_trial"
"""Attribute of a network that holds the result of its trial."""
FACTORS = (1, 2)
"""Factors of the losses of two passes whose gradients are compared; they have the same rounding errors in any type."""


@dataclass(frozen=True, kw_only=True)
class PassState:
    """State that passes in training change, by name, and properties that decide whether a batch may be split."""

    constant_changes: frozenset[str] = frozenset()
    """State that each pass changes in the same way, whatever its samples are."""
    sample_dependent: tuple[str, ...] = ()
    """State that depends on the samples or on random numbers of each pass, without running statistics."""
    set_once: tuple[str, ...] = ()
    """State that depends on the samples of the first pass alone."""
    not_saved: tuple[str, ...] = ()
    """State that checkpoints do not hold."""
    needs_unsaved: bool = False
    """Whether the outputs of the next pass depend on state that checkpoints do not hold."""
    couples_samples: bool = False
    """Whether outputs of a sample, or losses of layers, depend on the other samples, other than by batch norms."""
    has_nonlinear_gradients: bool = False
    """Whether the sum of the gradients of a batch's parts differs from the whole batch's, as with hooks that clamp."""
    hooked_weight: str | None = None
    """Weight whose gradient the user's hooks see or change."""
    adds_losses: bool = False
    """Whether layers add losses that may depend on samples."""
    ends_in_softmax: bool = False
    """Whether outputs are probabilities rather than logits."""
    num_outputs: int = 0
    """Number of outputs of a sample, or of a token."""
    resized: frozenset[str] = frozenset()
    """State that has another shape after a pass."""
    scratch: frozenset[str] = frozenset()
    """State that passes change, that checkpoints do not hold and that no outputs need, which may differ on ranks."""


class Snapshot(Protocol):
    """Copy of the state of a network."""

    def changes(self) -> set[str]:
        """Return the names of the state that has changed since."""
        ...

    def restore(self, *, without: Collection[str] = ()) -> None:
        """Restore the state, except for the names of `without`."""
        ...

    def next(self, changed: Collection[str]) -> Snapshot:
        """Return a snapshot of the present state, which differs from this one only in the names of `changed`."""
        ...


def try_passes(
    run: Callable[[int, int], Any],
    before: Snapshot,
    *,
    averaged: Callable[[], set[str]],
    not_saved: Callable[[set[str]], set[str]],
    may_couple: bool,
    may_hide: bool = False,
) -> tuple[Any, PassState]:
    """Run a network in training and find out what passes change. The network's state is not restored afterwards.

    Args:
        run: makes a training pass; takes the index of the samples in `variants_of` and a seed of random numbers, and
            returns the outputs, which are compared only if they are an array.
        before: a snapshot of the network.
        averaged: returns the names of running statistics.
        not_saved: returns those of the given names that checkpoints do not hold.
        may_couple: whether to test if the outputs of a sample depend on the others.
        may_hide: whether to test if a repeated pass has other outputs although the snapshot has been restored.

    Returns: the outputs of the first pass, and the state that passes change.
    """
    trial = _Trial(run, before, averaged)
    if trial.changed or may_couple:
        trial.exchange_samples(may_couple=may_couple)
    sample_dependent = trial.sample_dependent
    each_time = trial.changed_again() if sample_dependent else set[str]()
    constant, lacking = trial.changed - sample_dependent, not_saved(trial.changed | sample_dependent)
    needs_unsaved = bool(lacking) and trial.outputs_need(lacking)
    scratch = frozenset[str]() if needs_unsaved else frozenset(lacking)
    if lacking and not needs_unsaved:
        sample_dependent -= lacking
        set_anew = lacking - trial.after.changes()  # by each pass, such as an auxiliary loss or masked weights
        lacking, constant = lacking - set_anew, constant - set_anew
    # State that only the network's code can reach would also have changed the outputs of the samples that stayed.
    may_hide = may_hide and not needs_unsaved and (trial.couples_samples or not may_couple)
    if may_hide and trial.outputs_need(()):
        lacking, needs_unsaved = {_HIDDEN}, True
    return trial.outputs, PassState(
        constant_changes=frozenset(constant),
        sample_dependent=tuple(sorted(each_time & sample_dependent)),
        set_once=tuple(sorted(sample_dependent - each_time)),
        not_saved=tuple(sorted(lacking)),
        needs_unsaved=needs_unsaved,
        couples_samples=trial.couples_samples,
        scratch=scratch,
    )


class _Trial:
    """Compares a first pass with others that begin in the same state."""

    def __init__(self, run: Callable[[int, int], Any], before: Snapshot, averaged: Callable[[], set[str]]) -> None:
        self._run, self._before, self._averaged = run, before, averaged
        self.outputs = run(0, 0)
        self.changed = self._changes_since(before)
        """Names of state that the first pass changed, without running statistics."""
        self.after = before
        """Snapshot after the first pass, if other samples were tried."""
        self.sample_dependent = set[str]()
        """Names of state whose change depends on the samples."""
        self.couples_samples = False

    def exchange_samples(self, *, may_couple: bool) -> None:
        """Repeat the first pass with every second sample exchanged, which must not change the outputs of the rest."""
        self.after = self._snapshot()
        outputs = self._repeat(1)
        self.sample_dependent = self._changes_since(self.after)
        if may_couple:
            self.couples_samples = not _same(self.outputs, outputs, slice(1, None, 2)) or self._couples_copies()

    def _couples_copies(self) -> bool:
        """Repeat the first pass with copies of its last sample, whose outputs must be those of that sample."""
        copies = self._repeat(2)
        self.sample_dependent |= self._changes_since(self.after)
        if not _same(self.outputs, copies, slice(-1, None)):
            return True
        has_equal_rows = _has_equal_rows(copies)
        # The state may count samples, or be the network's own generator, which draws numbers for each sample.
        if has_equal_rows or self.changed - self.sample_dependent:
            after = self._snapshot()
            fewer = self._repeat(3)
            self.sample_dependent |= self._changes_since(after)
            if has_equal_rows:
                return not self.sample_dependent and _depends_on_number(copies, fewer)
        # Copies differ by random numbers; another seed changes these, unless they are from such a generator.
        return not self.sample_dependent and _same(copies, self._repeat(2, seed=1), slice(None))

    def changed_again(self) -> set[str]:
        """Return the names of state that one more pass changes."""
        now = self._snapshot()
        self._run(0, 0)
        return now.changes()

    def outputs_need(self, names: Collection[str]) -> bool:
        """Return whether the first pass has other outputs if all state except `names` is restored."""
        self._before.restore(without=names)
        return not _same(self.outputs, self._run(0, 0), slice(None))

    def _repeat(self, number: int, seed: int = 0) -> Any:
        self._before.restore()
        return self._run(number, seed)

    def _changes_since(self, snapshot: Snapshot) -> set[str]:
        return snapshot.changes() - self._averaged()

    def _snapshot(self) -> Snapshot:
        return self._before.next(self._before.changes())


_HIDDEN = "something that its code alone can reach"


def num_samples(shape: Sequence[int]) -> int:
    """Return the number of samples of a shape that a trial takes; large ones cost time, so it takes fewer."""
    return 3 if math.prod(shape) > 4096 else 9


def variants_of(samples: np.ndarray, drawn: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the samples of the passes of a trial.

    Args:
        samples: (n, ...).
        drawn: other samples, (n, ...).

    Returns: `samples`; `samples` with every second one, from the first on, replaced; n copies of the last one; and two
        thirds of these copies, because copies all take the same way, such as to one expert with room for a few.
    """
    others, alike = samples.copy(), samples.copy()
    others[::2] = drawn[::2]
    if drawn.dtype.kind == "f":
        others[::2] *= 3  # a sample that depends on them changes by more than rounding
    alike[:] = samples[-1]
    return samples, others, alike, alike[len(alike) // 3 :]


def are_multiples(gradients: Sequence[Any], others: Sequence[Any], factor: float) -> bool:
    """Return whether `others` are `gradients` times `factor`, within rounding; None stands for no gradient."""
    # A bias that has no effect has rounding errors as its gradient, and so has a layer whose gradients vanish.
    largest = max((float(np.abs(one).max(initial=0)) for one in gradients if one is not None), default=0)
    rounding = max(1e-5 * largest, 1e-10)
    return all(
        np.allclose(factor * one, other, rtol=1e-3, atol=1e-3 * np.abs(one).max(initial=0) + rounding, equal_nan=True)
        for one, other in zip(gradients, others, strict=True)
        if one is not None and other is not None
    )


def _same(outputs: Any, others: Any, samples: slice) -> bool:
    """Return whether the outputs of `samples` are the same within rounding; true if they are not arrays."""
    if not isinstance(outputs, np.ndarray) or not isinstance(others, np.ndarray) or outputs.ndim == 0:
        return True
    if outputs.shape != others.shape:
        return False
    return np.allclose(outputs[samples], others[samples], rtol=1e-3, atol=1e-4, equal_nan=True)


def _has_equal_rows(outputs: Any) -> bool:
    """Return whether all samples have the same outputs; true if these are not an array."""
    return not isinstance(outputs, np.ndarray) or _same(outputs, outputs[::-1], slice(None))


def _depends_on_number(outputs: Any, fewer: Any) -> bool:
    """Return whether fewer copies of a sample have other outputs, beyond rounding errors of any type."""
    if not isinstance(outputs, np.ndarray) or not isinstance(fewer, np.ndarray) or not outputs.ndim or not fewer.ndim:
        return False
    one, other = outputs[0].astype(np.float32), fewer[0].astype(np.float32)
    tolerance = 0.05 * np.nan_to_num(np.abs(one)).max(initial=0)
    return one.shape != other.shape or not np.allclose(one, other, rtol=0, atol=tolerance, equal_nan=True)


def are_probabilities(outputs: np.ndarray) -> bool:
    """Return whether rows of `outputs` are non-negative and add up to 1, as after a softmax."""
    if outputs.ndim < 2 or outputs.shape[-1] < 2:
        return False
    return bool((outputs >= 0).all() and (np.abs(outputs.sum(-1) - 1) < 1e-4).all())
