"""Measurements of a study over the seeds, and whether they are as expected."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from allstep.commands.study.description import Claim, StudyResult, StudyRun

LOWER_IS_BETTER = ("loss", "seconds", "bytes", "rise")
"""Suffixes of the names of measures that are better if lower."""


@dataclass(frozen=True)
class Spread:
    """A measure of a variant over its seeds."""

    variant: str
    mean: float
    deviation: float
    """Standard deviation of runs; 0 for a single run."""
    num_runs: int


@dataclass(frozen=True)
class Verdict:
    """Result of checking a claim."""

    claim: Claim
    of: Spread | None
    """The best of the claim's variants, or the worst for worse_by; None if none was measured."""
    against: Spread | None
    value: float | None
    """Amount by which it is better (negative: worse), or how many times as large it is; None if unknown."""

    @property
    def came_out(self) -> bool | None:
        if self.value is None:
            return None
        signed = -self.value if self.claim.relation == "worse_by" else self.value
        return signed >= (-self.claim.bound if self.claim.relation == "within" else self.claim.bound)


def final_values(result: StudyResult, variant: str, measure: str) -> list[float]:
    """Return the last value of a measure in each run, or the study's value for runs that diverged."""
    found = []
    for run in _runs(result, variant):
        values = [point[measure] for point in run.points if measure in point]
        if run.diverged:
            values = [value for name, value in result.description.diverged_counts_as.items() if name == measure]
        found += values[-1:]
    return found


def spread(result: StudyResult, variant: str, measure: str) -> Spread | None:
    """Return mean and deviation of a measure; None if no run has it."""
    values = final_values(result, variant, measure)
    return _spread(variant, values) if values else None


def num_diverged(result: StudyResult, variant: str) -> int:
    return sum(run.diverged for run in _runs(result, variant))


def curve(result: StudyResult, variant: str, x: str, y: str) -> tuple[list[float], list[Spread]]:
    """Return a measure over another one, event by event: means of both over the runs that did not diverge."""
    runs = [
        [(point[x], point[y]) for point in run.points if x in point and y in point]
        for run in _runs(result, variant)
        if not run.diverged
    ]
    length = min(map(len, runs), default=0)
    events = [[run[number] for run in runs] for number in range(length)]
    xs = [statistics.fmean(one for one, _ in event) for event in events]
    values = [[other for _, other in event] for event in events]
    return xs, [_spread(variant, one) for one in values]


def _spread(variant: str, values: Sequence[float]) -> Spread:
    return Spread(variant, statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values))


def judge(result: StudyResult) -> list[Verdict]:
    """Return a verdict for each claim."""
    return [_verdict(result, claim) for claim in result.description.claims]


def _verdict(result: StudyResult, claim: Claim) -> Verdict:
    against = spread(result, claim.against, claim.measure)
    found = [one for name in claim.of if (one := spread(result, name, claim.measure))]
    if against is None or not found:
        return Verdict(claim, None, against, None)
    if claim.relation == "times" and not against.mean:  # nothing is a number of times 0
        return Verdict(claim, found[0], against, None)
    values = [_relative(claim, one, against) for one in found]
    value = min(values) if claim.relation == "worse_by" else max(values)
    return Verdict(claim, found[values.index(value)], against, value)


def _relative(claim: Claim, of: Spread, against: Spread) -> float:
    if claim.relation == "times":
        return of.mean / against.mean
    difference = of.mean - against.mean
    return -difference if claim.measure.endswith(LOWER_IS_BETTER) else difference


def _runs(result: StudyResult, variant: str) -> Sequence[StudyRun]:
    return [run for run in result.runs if run.variant == variant]
