"""The section of a study: what was asked, what was measured, and whether it is what was expected."""

from __future__ import annotations

from collections.abc import Sequence

from allstep.benchmarks.records.studies import StudyResult
from allstep.benchmarks.reporting.document import NOTHING, Section, Table, amount, share
from allstep.benchmarks.reporting.figures import Drawing, Line, bars, lines
from allstep.benchmarks.studying.description import FigureWanted, names_of_variants
from allstep.benchmarks.studying.judging import Spread, Verdict, curve, judge, num_diverged, spread


def study(result: StudyResult) -> Section:
    """A result of `allstep study`."""
    described = result.description
    verdicts = judge(result)
    section = Section(described.title, commands=[result.command])
    section.text = [described.question, f"Expected: {described.expectation} ({described.source})", _outcome(verdicts)]
    section.text += [described.remark] if described.remark else []
    if not result.finished:
        section.text.append(f"The study is unfinished: {len(result.runs)} runs of {_num_runs(result)} have ended.")
    section.items = list(map(_sentence, verdicts))
    section.figures = [drawing for wanted in described.figures if (drawing := _figure(result, wanted))]
    section.tables = [_claims(verdicts), _measured(result)]
    return section


def _num_runs(result: StudyResult) -> int:
    return len(result.variants) * result.seeds


def _outcome(verdicts: Sequence[Verdict]) -> str:
    num_true = sum(verdict.came_out is True for verdict in verdicts)
    if num_true == len(verdicts):
        return f"It came out as expected: {num_true} of {num_true} claims hold."
    return f"It did not come out as expected: {num_true} of {len(verdicts)} claims hold."


def _sentence(verdict: Verdict) -> str:
    """A claim and what was measured for it."""
    claim = verdict.claim
    if verdict.of is None or verdict.against is None or verdict.value is None:
        return f"NOT KNOWN: {claim.says} No run has a {_name(claim.measure)} of both."
    of, against = (f"{one.variant}: {_with_deviation(claim.measure, one)}" for one in (verdict.of, verdict.against))
    if claim.relation == "times":
        relation = f"{verdict.value:.3g} times as large"
    else:
        how = "better" if verdict.value >= 0 else "worse"
        relation = f"{how} by {_number(claim.measure, abs(verdict.value))}"
    answer = "YES" if verdict.came_out else "NO"
    return f"{answer}: {claim.says} Measured ({_name(claim.measure)}): {of}; {against}; {relation}."


def _claims(verdicts: Sequence[Verdict]) -> Table:
    rows = []
    for verdict in verdicts:
        claim = verdict.claim
        number = amount if claim.relation == "times" else lambda value, measure=claim.measure: _number(measure, value)
        measured = NOTHING if verdict.value is None else number(verdict.value)
        bound = f"{claim.relation.replace('_', ' ')} {number(claim.bound)}"
        rows.append([claim.says, bound, measured, {True: "yes", False: "NO", None: "not known"}[verdict.came_out]])
    caption = "What was expected, and by how much it was better (worse: -)"
    return Table(caption, ["", "bound", "measured", "holds"], rows)


def _measured(result: StudyResult) -> Table:
    """Mean and deviation of each measure that claims or figures look at, at the end of the runs."""
    axes = {figure.x for figure in result.description.figures}
    measures = [name for name in result.description.measures if name not in axes]
    rows = []
    for variant in result.variants:
        spreads = [(measure, spread(result, variant, measure)) for measure in measures]
        cells = [_with_deviation(measure, one) if one else NOTHING for measure, one in spreads]
        num_runs = sum(run.variant == variant for run in result.runs)
        rows.append([variant, *cells, str(num_runs), str(num_diverged(result, variant))])
    header = ["", *map(_name, measures), "runs", "diverged"]
    caption = f"At the end of training: mean and standard deviation over {result.seeds} seeds"
    if counts := result.description.diverged_counts_as:
        counted = ", ".join(f"{_name(measure)} {_number(measure, value)}" for measure, value in counts.items())
        caption += f"; a run that diverged counts as {counted}"
    return Table(f"{caption}.", header, rows)


def _figure(result: StudyResult, wanted: FigureWanted) -> Drawing | None:
    """A curve for each series over the study's x, or for each variant over another measure; else bars."""
    axis = result.description.x
    label = wanted.label or _name(wanted.y)
    look = {"y_label": label, "y_scale": wanted.y_scale}
    if wanted.x is not None:
        curves = [_line(one, *curve(result, one, wanted.x, wanted.y)) for one in result.variants]
        curves = [one for one in curves if one.x]
        caption = f"{label} against {_name(wanted.x)}"
        return lines(caption, curves, x_label=_name(wanted.x), x_scale=wanted.x_scale, **look) if curves else None
    if axis is None or not all(type(x) in (int, float) for x in axis.values):
        found = [one for name in result.variants if (one := spread(result, name, wanted.y))]
        names = [one.variant for one in found]
        return bars(label, names, [one.mean for one in found], x_label=label) if found else None
    curves = []
    variants = names_of_variants(result.description)
    for series in result.description.series:
        points = [
            (float(x), one)
            for name, (own, x) in variants.items()
            if own == series and (one := spread(result, name, wanted.y))
        ]
        if points:
            curves.append(_line(series, *map(list, zip(*points, strict=True))))
    if not curves:
        return None
    caption = f"{label} against {axis.label}"
    ticks = [float(x) for x in axis.values]
    return lines(caption, curves, x_label=axis.label, x_scale=wanted.x_scale, x_ticks=ticks, **look)


def _line(label: str, x: Sequence[float], spreads: Sequence[Spread]) -> Line:
    low, high = ([one.mean + sign * one.deviation for one in spreads] for sign in (-1, 1))
    return Line(label, x, [one.mean for one in spreads], low, high)


def _name(measure: str) -> str:
    return measure.replace("_", " ")


def _number(measure: str, value: float) -> str:
    return share(value) if measure.endswith("accuracy") else amount(value)


def _with_deviation(measure: str, one: Spread) -> str:
    return f"{_number(measure, one.mean)} ± {_number(measure, one.deviation)}"
