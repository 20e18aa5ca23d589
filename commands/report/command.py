"""Write report.html and report.md from results of allstep's commands and trainers.

    allstep report DIR...

Takes results of `allstep compare`, `allstep collectives`, `allstep forecast --output` and `--validate --output`,
`allstep study`, `allstep tune`, saved benchmarks, training runs (metrics.jsonl) and their profiles, anywhere in the
directories. Both files go to the first directory. report.html is one file that needs no network: it can be mailed, read
on a phone and printed. Unreadable files, and directories without any results, are listed on the terminal and in the
report, one line each, and left out; the exit status is 2 if nothing is left.
"""

import sys
from collections.abc import Sequence

from allstep.commands.collectives.section import collectives
from allstep.commands.forecast import section as forecast
from allstep.commands.report import compare_sections, other_sections
from allstep.commands.report.sources import Sources, read
from allstep.commands.shared.page.document import Section, render
from allstep.commands.shared.records.files import written_whole
from allstep.commands.study import section
from allstep.common.base.errors import UserError, printable
from allstep.common.base.flag_types import Parser, nonempty_path


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
    for problem in sources.problems:
        print(f"left out: {printable(problem)}", file=sys.stderr)
    if not sections:
        raise UserError(
            f"expected results of allstep compare, collectives, forecast, study or a training run, received none in "
            f"{', '.join(map(str, flags.directories))}; name their --output-dir"
        )
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
    sections: list[Section] = []
    for _, result in sources.compares:
        sections += compare_sections.sections(result)
    sections += [collectives(result) for _, result in sources.collectives]
    sections += [forecast.forecast(result) for _, result in sources.forecasts]
    sections += [forecast.validation(result) for _, result in sources.validations]
    sections += [other_sections.benchmark(path, result) for path, result in sources.benchmarks]
    sections += [section.study(result) for _, result in sources.studies]
    sections += [other_sections.search(path, result) for path, result in sources.searches]
    if sources.runs:
        sections.append(other_sections.runs(sources.runs))
    sections += [other_sections.profile(path, result) for path, result in sources.profiles]
    return sections
