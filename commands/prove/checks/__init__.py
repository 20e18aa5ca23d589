"""Checks of the ranks' records: pure functions, one file for each aspect of data-parallel training."""

from collections.abc import Sequence
from dataclasses import replace

from allstep.commands.prove.checks import cooperation, gradients, outputs, randomness, rates, samples, sharing, weights
from allstep.commands.prove.checks.wording import in_words_of
from allstep.commands.prove.findings import Finding
from allstep.commands.prove.runs import Runs

_OTHER_STEPS = ("steps-skipped", "line-search-alone")
"""Findings that ranks take different steps, whose gradients and collectives then do not fit."""
_MOVE_WEIGHTS = (
    "weights-differ",
    "optimizer-state-differs",
    "gradients-not-averaged",
    "gradients-partly-averaged",
    "samples-differ",
    "clipped-before-average",
    "learning-rate-differs",
    *_OTHER_STEPS,
)
"""Findings that explain why weights diverge."""


def findings(runs: Runs) -> list[Finding]:
    """Return all findings, one of each kind for a line, except those that are consequences of another."""
    if alone := [*cooperation.check_world(runs)]:
        return alone
    found = [*weights.check(runs), *cooperation.check_steps(runs)]
    takes_same_steps = not any(one.name in _OTHER_STEPS for one in found)
    if takes_same_steps:
        found += gradients.check(runs)
    found += rates.check(runs)
    if not any(one.name in _MOVE_WEIGHTS for one in found):
        found += weights.check_later(runs)
    for check in (samples.check, randomness.check, outputs.check, cooperation.check_devices):
        found += check(runs)
    # Losses that compare samples with each other change if a sample is there twice.
    moved = [(cause, "buffers-differ") for cause in (*_MOVE_WEIGHTS, "weights-part")]  # also averages, and GANs' rivals
    for cause, effect in (*moved, ("same-samples", "loss-scaled")):
        if any(one.name == cause for one in found):
            found = [one for one in found if one.name != effect]
    if takes_same_steps and not any(one.name == "uneven-batches" for one in found):
        found += cooperation.check_collectives(runs)
    first = {(one.name, one.line): one for one in reversed(found)}
    return [replace(one, mend=in_words_of(runs.together, one.mend)) for one in reversed(first.values())]


def perhaps(runs: Runs, found: Sequence[Finding]) -> list[str]:
    """Return what may be wrong in addition to the findings."""
    if any(one.name in ("ranks-alone", "replicas-idle", "same-samples") for one in found):
        return []
    names = {one.name for one in found}
    lines = [one for one in (sharing.judge(runs), samples.same_samples(runs.together)) if isinstance(one, str)]
    if not names & {"uneven-batches", "collective-left-out", *_OTHER_STEPS}:
        lines += cooperation.may_be_uneven(runs.together)
    for check in (cooperation.may_restore_less, cooperation.may_search):
        lines += check(runs.together)
    return [in_words_of(runs.together, one) for one in (*lines, *randomness.may_be_wrong(runs, names))]
