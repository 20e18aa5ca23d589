"""The page of a study: study.md and the files of its figures."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from allstep.commands.shared.page.render import render
from allstep.commands.study.judging import judge
from allstep.commands.study.records import StudyResult
from allstep.commands.study.section import outcome, study
from allstep.common.files.disk import write_atomically

PAGE = "study.md"


def write_page(directory: Path, result: StudyResult) -> list[str]:
    """Write study.md, and each figure as SVG and PNG; return the outcome as lines for the terminal."""
    section = study(result)
    names = [f"figure-{number}" for number, _ in enumerate(section.figures, 1)]
    figures = [figure.save(directory / name) for name, figure in zip(names, section.figures, strict=True)]
    saved = dataclasses.replace(section, figures=figures)
    with write_atomically(directory / PAGE) as stream:
        stream.write(render("report.md", f"allstep study {result.name}", [saved], []).encode())
    return [
        *section.items,
        outcome(judge(result)),
        f"written to {directory / PAGE}: allstep report {directory} includes it",
    ]
