"""Checks of the ranks' records: pure functions, one file for each aspect of data-parallel training."""

from __future__ import annotations

from collections.abc import Sequence

from allstep.commands.prove.checks import cooperation, gradients, outputs, randomness, rates, samples, sharing, weights
from allstep.commands.prove.findings import Finding
from allstep.commands.prove.runs import Runs

_MOVE_WEIGHTS = (
    "weights-differ",
    "optimizer-state-differs",
    "gradients-not-averaged",
    "gradients-partly-averaged",
    "clipped-before-average",
    "learning-rate-differs",
    "steps-skipped",
)
"""Findings that explain why weights diverge."""


def findings(runs: Runs) -> list[Finding]:
    """Return all findings, except those that are consequences of another."""
    if alone := [*cooperation.check_world(runs)]:
        return alone
    found = [*weights.check(runs), *cooperation.check_steps(runs)]
    if not any(one.name == "steps-skipped" for one in found):
        found += gradients.check(runs)
    found += rates.check(runs)
    if not any(one.name in _MOVE_WEIGHTS for one in found):
        found += weights.check_later(runs)
    for check in (samples.check, randomness.check, outputs.check, cooperation.check_devices):
        found += check(runs)
    if not any(one.name in ("uneven-batches", "steps-skipped") for one in found):
        found += cooperation.check_collectives(runs)
    return found


def perhaps(runs: Runs, found: Sequence[Finding]) -> list[str]:
    """Return what may be wrong in addition to the findings."""
    if any(one.name in ("ranks-alone", "replicas-idle", "same-samples") for one in found):
        return []
    verdict = sharing.judge(runs)
    return [*([verdict] if isinstance(verdict, str) else []), *randomness.may_be_same(runs)]
