"""The section of a study: the question, the measurements, and whether they are as expected."""

from collections.abc import Sequence
from functools import partial

from allstep.commands.shared.page.document import NOTHING, Section, Table, amount, share
from allstep.commands.shared.page.figures import Drawing, Line, bars, lines
from allstep.commands.study.description import FigureWanted, StudyResult, names_of_variants
from allstep.commands.study.judging import Spread, Verdict, curve, judge, num_diverged, spread


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
        num_runs = sum(run.variant == variant for run in result.runs)
        rows.append([variant, *cells, str(num_runs), str(num_diverged(result, variant))])
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
    return f"{_number(measure, one.mean)} ± {_number(measure, one.deviation)}"
