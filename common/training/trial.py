"""Trial of a user's network before training: what a pass changes by itself, from which `trial_check` rules out runs.

State that a pass in training changes without an optimizer are counters, flags, averages, codebooks. What depends on the
samples of the pass can be the same as in one process only where one pass has the whole batch; running statistics alone
are averaged over ranks. What does not depend on them is the same on all ranks.
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


def are_probabilities(outputs: np.ndarray) -> bool:
    """Return whether rows of `outputs` are non-negative and add up to 1, as after a softmax."""
    if outputs.ndim < 2 or outputs.shape[-1] < 2:
        return False
    return bool((outputs >= 0).all() and (np.abs(outputs.sum(-1) - 1) < 1e-4).all())
