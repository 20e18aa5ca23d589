"""The section of a study: the question, its measurements over the seeds, and whether they are as expected."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from allstep.commands.shared.page.document import NOTHING, Section, Table, amount, share
from allstep.commands.shared.page.figures import Drawing, Line, bars, lines
from allstep.commands.study.description import Claim, FigureWanted, StudyResult, StudyRun, names_of_variants

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


def study(result: StudyResult) -> Section:
    """Return the section of a result of `allstep study`."""
    described = result.description
    verdicts = judge(result)
    section = Section(described.title, commands=[result.command])
    section.text = [described.question, f"Expected: {described.expectation} ({described.source})", outcome(verdicts)]
    section.text += [described.remark] if described.remark else []
    if not result.finished:
        num_runs = len(result.variants) * result.seeds
        section.text.append(f"The study is unfinished: {len(result.runs)} runs of {num_runs} have ended.")
    section.items = list(map(_sentence, verdicts))
    section.figures = [drawing for wanted in described.figures if (drawing := _figure(result, wanted))]
    section.tables = [_claims(verdicts), _measured(result)]
    return section


def outcome(verdicts: Sequence[Verdict]) -> str:
    """Return a sentence on whether the expectation came true."""
    num_true = sum(verdict.came_out is True for verdict in verdicts)
    if num_true == len(verdicts):
        return f"It came out as expected: {num_true} of {num_true} claims hold."
    return f"It did not come out as expected: {num_true} of {len(verdicts)} claims hold."


def _sentence(verdict: Verdict) -> str:
    """Return a claim and its measurements as a sentence."""
    claim = verdict.claim
    if verdict.of is None or verdict.against is None or verdict.value is None:
        return f"NOT KNOWN: {claim.says} No run has a {_name(claim.measure)} of both."
    of, against = (f"{one.variant}: {_with_deviation(claim.measure, one)}" for one in (verdict.of, verdict.against))
    if claim.relation == "times":
        relation = f"{verdict.value:.3g} times as large"
    else:
        how = "better" if verdict.value >= 0 else "worse"
        relation = f"{how} by {_difference(claim.measure, abs(verdict.value))}"
    answer = "YES" if verdict.came_out else "NO"
    return f"{answer}: {claim.says} Measured ({_name(claim.measure)}): {of}; {against}; {relation}."


def _claims(verdicts: Sequence[Verdict]) -> Table:
    rows = []
    for verdict in verdicts:
        claim = verdict.claim
        measure = claim.measure if claim.relation != "times" else ""
        measured = NOTHING if verdict.value is None else _difference(measure, verdict.value)
        bound = f"{claim.relation.replace('_', ' ')} {_difference(measure, claim.bound)}"
        rows.append([claim.says, bound, measured, {True: "yes", False: "NO", None: "not known"}[verdict.came_out]])
    caption = "What was expected, and by how much it was better (worse: -)"
    return Table(caption, ["", "bound", "measured", "holds"], rows)


def _measured(result: StudyResult) -> Table:
    """Tabulate mean and deviation of measures at the end of the runs, without those that are only drawn as curves."""
    described = result.description
    measures = [figure.y for figure in described.figures if figure.x is None]
    measures = list(dict.fromkeys((*measures, *(claim.measure for claim in described.claims))))
    rows = []
    for variant in result.variants:
        spreads = [(measure, spread(result, variant, measure)) for measure in measures]
        cells = [_with_deviation(measure, one) if one else NOTHING for measure, one in spreads]
        runs = _runs(result, variant)
        rows.append([variant, *cells, str(len(runs)), str(sum(run.diverged for run in runs))])
    header = ["", *map(_name, measures), "runs", "diverged"]
    caption = f"At the end of training: mean and standard deviation over {result.seeds} seeds"
    if counts := described.diverged_counts_as:
        counted = ", ".join(f"{_name(measure)} {_number(measure, value)}" for measure, value in counts.items())
        caption += f"; a run that diverged counts as {counted}"
    return Table(f"{caption}.", header, rows)


def _figure(result: StudyResult, wanted: FigureWanted) -> Drawing | None:
    """Draw a curve for each series over the study's x, or for each variant over another measure; else bars."""
    axis = result.description.x
    label = wanted.label or _name(wanted.y)
    if wanted.x is None and (axis is None or not all(type(x) in (int, float) for x in axis.values)):
        found = [one for name in result.variants if (one := spread(result, name, wanted.y))]
        names, means, deviations = ([getattr(one, name) for one in found] for name in ("variant", "mean", "deviation"))
        return bars(label, names, means, x_label=label, whiskers=deviations) if found else None
    if wanted.x is not None:
        x_label, ticks = _name(wanted.x), []
        curves = [_line(one, *curve(result, one, wanted.x, wanted.y)) for one in result.variants]
    else:
        assert axis is not None
        x_label, ticks = axis.label, [float(x) for x in axis.values]
        curves = [_over_x(result, series, wanted.y) for series in result.description.series]
    curves = [one for one in curves if one.x]
    draw = partial(lines, x_scale=wanted.x_scale, y_scale=wanted.y_scale, x_ticks=ticks)
    return draw(f"{label} against {x_label}", curves, x_label=x_label, y_label=label) if curves else None


def _over_x(result: StudyResult, series: str, measure: str) -> Line:
    variants = names_of_variants(result.description)
    own = [(float(x), spread(result, name, measure)) for name, (one, x) in variants.items() if one == series]
    points = [(x, found) for x, found in own if found]
    return _line(series, [x for x, _ in points], [found for _, found in points])


def _line(label: str, x: Sequence[float], spreads: Sequence[Spread]) -> Line:
    low, high = ([one.mean + sign * one.deviation for one in spreads] for sign in (-1, 1))
    return Line(label, x, [one.mean for one in spreads], low, high)


def _name(measure: str) -> str:
    return measure.replace("_", " ")


def _number(measure: str, value: float) -> str:
    return share(value) if measure.endswith("accuracy") else amount(value)


def _difference(measure: str, value: float) -> str:
    return f"{100 * value:.1f} points" if measure.endswith("accuracy") else amount(value)


def _with_deviation(measure: str, one: Spread) -> str:
    mean = _number(measure, one.mean)
    return mean if one.num_runs == 1 else f"{mean} ± {_number(measure, one.deviation)}"
