"""What is looked at: pure functions of the ranks' records, a file for each part of data-parallel training."""

from __future__ import annotations

from collections.abc import Sequence

from allstep.commands.prove.checks import cooperation, gradients, outputs, randomness, rates, samples, sharing, weights
from allstep.commands.prove.findings import Finding
from allstep.commands.prove.runs import Runs


def findings(runs: Runs) -> list[Finding]:
    """All that is wrong; of a cause and its consequences, the cause alone."""
    if alone := [*cooperation.check_world(runs)]:
        return alone
    found = [*weights.check(runs), *gradients.check(runs)]
    if not found:
        found += weights.check_later(runs)
    for check in (samples.check, rates.check, randomness.check, outputs.check, cooperation.check_devices):
        found += check(runs)
    if not any(one.name == "uneven-batches" for one in found):
        found += cooperation.check_collectives(runs)
    return found


def perhaps(runs: Runs, found: Sequence[Finding]) -> list[str]:
    """What may be wrong, beside what was found."""
    if any(one.name in ("ranks-alone", "replicas-idle", "same-samples") for one in found):
        return []
    verdict = sharing.judge(runs)
    return [verdict] if isinstance(verdict, str) else []
