"""Write report.html and report.md from what allstep's commands and trainers have left in directories.

    allstep report DIR...

Takes results of `allstep compare`, `allstep collectives`, `allstep predict --output` and `--validate --output`,
`allstep study`, `allstep tune`, kept benchmarks, and training runs (metrics.jsonl), wherever in the directories they
are. Both files go to the first directory. report.html is one file that needs no network: it can be mailed, read on a
phone and printed. What cannot be read, and a directory without any of these, is named in one line, on the terminal and
in the report, and the rest goes on; the exit status is 2 where there is no rest.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from allstep.commands.report import compare_sections, other_sections, search_section
from allstep.commands.report.sources import Sources, read
from allstep.commands.shared.page.document import Section
from allstep.commands.shared.page.render import render
from allstep.commands.study import section
from allstep.common.base.errors import UserError, printable
from allstep.common.base.flag_types import Parser, nonempty_path


def main(argv: Sequence[str] | None = None) -> None:
    """Write both files and say where they are.

    Raises:
        UserError: there is nothing to report, or no place to write to.
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
            f"expected results of allstep compare, collectives, predict, study or a training run, received none in "
            f"{', '.join(map(str, flags.directories))}; name their --output-dir"
        )
    for name in ("report.html", "report.md"):
        path = flags.directories[0] / name
        try:
            # What came from JSON may have halves of characters, which UTF-8 has not.
            note = "The figures are in report.html beside this file." if name == "report.md" else ""
            written = render(name, flags.title, sections, sources.problems, note=note)
            path.write_text(written, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise UserError(
                f"expected to write {path}, received: {error}; name a directory that may be written first"
            ) from None
        print(path)


def build(sources: Sources) -> list[Section]:
    """The sections of a report."""
    sections: list[Section] = []
    for _, result in sources.compares:
        sections += compare_sections.sections(result)
    sections += [other_sections.collectives(result) for _, result in sources.collectives]
    sections += [other_sections.forecast(result) for _, result in sources.forecasts]
    sections += [other_sections.validation(result) for _, result in sources.validations]
    sections += [other_sections.benchmark(path, result) for path, result in sources.benchmarks]
    sections += [section.study(result) for _, result in sources.studies]
    sections += [search_section.search(path, result) for path, result in sources.searches]
    if sources.runs:
        sections.append(other_sections.runs(sources.runs))
    return sections
