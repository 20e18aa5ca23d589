"""Write report.html and report.md from results of allstep's commands and trainers.

    allstep report DIR...

Takes results of `allstep compare`, `allstep collectives`, `allstep forecast --output` and `--validate --output`,
`allstep study`, `allstep tune`, saved benchmarks, training runs (metrics.jsonl) and their profiles, anywhere in the
directories. Both files go to the first directory. report.html is one file that needs no network: it can be mailed, read
on a phone and printed. Unreadable files, and directories without any results, are listed on the terminal and in the
report, one line each, and left out; if nothing is left, one line says why, and the exit status is 2.
"""

import sys
from collections.abc import Callable, Mapping, Sequence

from allstep.commands.collectives.section import collectives
from allstep.commands.compare.cells import INDEPENDENT
from allstep.commands.compare.records import CellResult, ComparisonResult
from allstep.commands.compare.samples import resolution
from allstep.commands.compare.table import answers, efficiency_of, name_of, ranks_of, table_of
from allstep.commands.forecast import section as forecast
from allstep.commands.report import other_sections
from allstep.commands.report.sources import RecordedRun, Sources, read
from allstep.commands.shared.page.document import NOTHING, Section, Table, facts, median, render
from allstep.commands.shared.page.figures import Drawing, Line, bars, lines
from allstep.commands.shared.records.collectives import CollectivesResult
from allstep.commands.shared.records.files import written_whole
from allstep.commands.shared.records.measured import BenchmarkResult
from allstep.commands.shared.records.runs import ProfileResult
from allstep.commands.study.description import StudyResult
from allstep.commands.study.section import study
from allstep.commands.tune.study import SearchResult
from allstep.common.base.errors import UserError, printable
from allstep.common.base.flag_types import Parser, nonempty_path
from allstep.common.files.strict_json import to_json


def main(argv: Sequence[str] | None = None) -> None:
    """Write both files and print their paths.

    Raises UserError if there is nothing to report, or the files cannot be written.
    """
    parser = Parser("allstep report", __doc__)
    parser.add_argument("directories", nargs="+", type=nonempty_path, metavar="DIR")
    parser.add_argument("--title", default="allstep: measurements", metavar="TEXT")
    flags = parser.parse_args(argv)
    sources = read(flags.directories)
    sections = build(sources)
    if not sections:
        problems = "; ".join(sources.problems[:3]) + "; ..." * (len(sources.problems) > 3)
        raise UserError(
            "expected results of allstep compare, collectives, forecast, study or a training run, received none "
            f"({problems}); name their --output-dir"
        )
    for problem in sources.problems:
        print(f"left out: {printable(problem)}", file=sys.stderr)
    for name in ("report.html", "report.md"):
        path = flags.directories[0] / name
        # Text from JSON may contain lone surrogates, which UTF-8 cannot encode.
        note = "The figures are in report.html next to this file." if name == "report.md" else ""
        written = render(name, flags.title, sections, sources.problems, note=note)
        with written_whole(path) as stream:
            stream.write(written.encode(errors="backslashreplace"))
        print(printable(str(path)))


def build(sources: Sources) -> list[Section]:
    """Return the sections of a report."""
    results = sources.results
    sections = [section for _, result in results[ComparisonResult] for section in compare_sections(result)]
    sections += [make(path, result) for kind, make in _SECTIONS.items() for path, result in results[kind]]
    if found := results[RecordedRun]:
        sections.append(other_sections.runs(found))
    return sections + [other_sections.profile(path, result) for path, result in results[ProfileResult]]


_SECTIONS = {
    CollectivesResult: lambda path, result: collectives(result),
    forecast.ForecastsResult: lambda path, result: forecast.forecast(result),
    forecast.ValidationResult: lambda path, result: forecast.validation(result),
    BenchmarkResult: other_sections.benchmark,
    StudyResult: lambda path, result: study(result),
    SearchResult: other_sections.search,
}
"""Function that makes the section of a result and its path, by kind in the order of the report."""
_WORKLOADS = {
    "synthetic-weak": "Computing and communication only (synthetic input, weak scaling)",
    "synthetic-strong": "A fixed global batch (synthetic input, strong scaling)",
    "real-weak": "With the input pipeline (real data, weak scaling)",
    "real-strong": "With the input pipeline and a fixed global batch (real data, strong scaling)",
}


def compare_sections(result: ComparisonResult) -> list[Section]:
    """Return the overview, a section for each of compare's tables, failures, rules and environment."""
    cells = result.cells
    measured: dict[tuple, list[CellResult]] = {}
    for cell in cells:
        if cell.images_per_second:
            measured.setdefault(cell.table, []).append(cell)
    tables = {
        f"{_WORKLOADS[workload]}: {model}, batch {batch_size}, {arithmetic}": rows
        for (workload, model, batch_size, arithmetic), rows in measured.items()
    }
    found = [_overview(result, tables), *(_measured(title, rows) for title, rows in tables.items())]
    missed = [cell for cell in cells if cell.status not in ("ok", "pending")]
    apart = [cell for cell in cells if cell.images_per_second and not cell.comparable]
    if missed or apart:
        rows = [[cell.id, cell.status, cell.reason or NOTHING] for cell in missed]
        rows += [[cell.id, "not comparable", cell.gate.reason or NOTHING] for cell in apart]
        found.append(Section("What failed or may not be compared", tables=[Table("", ["cell", "status", "why"], rows)]))
    found.append(Section("Rules of the comparison", items=list(result.rules)))
    pairs = [list(pair) for pair in facts(to_json(result.environment))]
    for framework, cell in {cell.framework: cell for cell in reversed(cells) if cell.gpu_libraries}.items():
        pairs += [[f"{name} of {framework}", ", ".join(paths)] for name, paths in cell.gpu_libraries.items()]
    found.append(Section("Environment", tables=[Table("", ["", ""], pairs)]))
    return found


def _overview(result: ComparisonResult, tables: Mapping[str, Sequence[CellResult]]) -> Section:
    """Return the section that names the faster framework and strategy of each table, and what is not known."""
    cells = result.cells
    counts = {status: sum(cell.status == status for cell in cells) for status in ("ok", "partial", "pending")}
    text = [f"{counts['ok']} of {len(cells)} cells measured in full, {counts['partial']} in part. {result.updated}."]
    if not result.finished:
        text.append(f"The comparison is unfinished: {counts['pending']} cells are still to be measured.")
    unknown = "There is nothing to rank: no framework has two strategies that may be compared on as many ranks."
    found = {title: answers(rows, is_short=True) or [unknown] for title, rows in tables.items()}
    return Section("Who is faster", answers=found, text=text, commands=[result.command])


def _measured(title: str, cells: Sequence[CellResult]) -> Section:
    """Return the section of one of compare's tables; its figures show only comparable cells side by side."""
    section = Section(title)
    alike = [cell for cell in cells if cell.comparable]
    for framework in dict.fromkeys(cell.framework for cell in alike):
        section.figures += _scaling(framework, [cell for cell in alike if cell.framework == framework])
    section.figures += _curves(cells)
    charts = (
        ("Seconds of training to the target accuracy", lambda cell: median(cell.seconds_to_target), "s"),
        ("Peak memory of the rank that took most", _memory, "MiB"),
        ("Lost to communication, of the rate of as many independent processes", _lost, "%"),
        ("From the launch to the end of the first step", lambda cell: median(cell.startup_seconds), "s"),
    )
    section.figures += [figure for caption, value, unit in charts if (figure := _bars(caption, alike, value, unit))]
    section.tables.append(table_of(cells))
    in_overview = answers(cells, is_short=True)
    section.text += [text for text in (*answers(cells), resolution(cells)) if text and text not in in_overview]
    section.commands = [cell.command for cell in cells]
    return section


def _scaling(framework: str, cells: Sequence[CellResult]) -> list[Drawing]:
    """Draw throughput and efficiency against ranks, with the ideal and the machine's limit."""
    strategies = list(dict.fromkeys(cell.strategy for cell in cells))
    ranks = sorted({cell.ranks for cell in cells})
    rates, efficiencies = [], []
    for strategy in strategies:
        own = sorted((cell for cell in cells if cell.strategy == strategy), key=lambda cell: cell.ranks)
        points = [(cell.ranks, cell.images_per_second) for cell in own if cell.images_per_second]
        is_limit = strategy == INDEPENDENT
        label = "limit: independent processes" if is_limit else strategy
        x, y = [num_ranks for num_ranks, _ in points], [rate.median for _, rate in points]
        low, high = ([], []) if is_limit else ([rate.low for _, rate in points], [rate.high for _, rate in points])
        rates.append(Line(label, x, y, low, high, reference=is_limit))
        known = [(cell.ranks, efficiency_of(cell, "single_process")) for cell in own]
        known = [(num_ranks, value) for num_ranks, value in known if value is not None]
        if known:
            x, y = map(list, zip(*known, strict=True))
            efficiencies.append(Line(label, x, y, reference=is_limit))
    alone = next((cell for cell in cells if cell.strategy == INDEPENDENT and cell.ranks == 1), None)
    if alone and alone.images_per_second and len(ranks) > 1:
        one = alone.images_per_second.median
        rates.append(Line("ideal", ranks, [one * num_ranks for num_ranks in ranks], reference=True))
    caption = f"Images per second: {framework}"
    figures = [lines(caption, rates, x_label="ranks", y_label="images/s", x_ticks=ranks, from_zero=True)]
    if efficiencies and len(ranks) > 1:
        efficiencies.append(Line("ideal", ranks, [1.0] * len(ranks), reference=True))
        caption = f"Efficiency against one plain process: {framework}"
        figures.append(lines(caption, efficiencies, x_label="ranks", y_label="", x_ticks=ranks, percent=True))
    return figures


def _curves(cells: Sequence[CellResult]) -> list[Drawing]:
    """Draw the curves of all cells in one frame."""
    losses, accuracies = [], []
    for cell in cells:
        if curve := cell.curve:
            label = f"{name_of(cell)}, {ranks_of(cell)}"
            losses.append(Line(label, [point.epoch for point in curve], [point.train_loss for point in curve]))
            seconds, accuracy = [point.seconds for point in curve], [point.validation_accuracy for point in curve]
            accuracies.append(Line(label, seconds, accuracy))
    if not losses:
        return []
    caption = "Validation accuracy against training time"
    return [
        lines("Training loss, curves over each other", losses, x_label="epoch", y_label="loss"),
        lines(caption, accuracies, x_label="seconds", y_label="accuracy"),
    ]


def _bars(
    caption: str, cells: Sequence[CellResult], value: Callable[[CellResult], float | None], unit: str
) -> Drawing | None:
    known = [(f"{name_of(cell)}, {ranks_of(cell)}", value(cell)) for cell in cells]
    known = [(label, number) for label, number in known if number is not None]
    return bars(caption, *zip(*known, strict=True), x_label=unit) if known else None


def _memory(cell: CellResult) -> float | None:
    return max(cell.peak_memory_bytes_by_rank) / 2**20 if cell.peak_memory_bytes_by_rank else None


def _lost(cell: CellResult) -> float | None:
    """Return the percentage of the limit that communication takes, including waiting for other ranks."""
    kept = efficiency_of(cell, "independent")
    return None if kept is None or cell.ranks == 1 or cell.strategy == INDEPENDENT else 100 * max(0.0, 1 - kept)
