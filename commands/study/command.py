"""Run a study: train its variants with several seeds, and report whether the literature's expectation came true.

    allstep study batch-size
    allstep study optimizers --dataset fashion-mnist --model wide-resnet
    allstep study my-study.yaml --seeds 10 --framework tensorflow

A study is a short YAML file that defines what is trained, what is measured and what is expected; the ones that come
with allstep are in commands/study/studies. All other flags are the trainers', and override the study's own. The output
directory keeps every run (study.json), figures (SVG and PNG) and a page (study.md); allstep report makes a section of
it. The same command again resumes an interrupted study.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from allstep.commands.shared.page.document import render
from allstep.commands.shared.records.files import command
from allstep.commands.study.description import MAX_SEEDS, STUDIES, StudyResult, read_description
from allstep.commands.study.running import begin, run_lacking, variants
from allstep.commands.study.section import judge, outcome, study
from allstep.common.base.errors import print_line, printable, warn
from allstep.common.base.flag_types import WEEK, Parser, local_ranks, nonempty_path, nonempty_text, one_of, whole
from allstep.common.catalog.strategies import FRAMEWORKS
from allstep.common.checkpoint import OutputDirectory
from allstep.common.cli.command_line import parse_beside
from allstep.common.files.disk import write_atomically
from allstep.common.process.requirements import need_frameworks

_MAX_AT_ONCE = 8  # each takes over half a gigabyte, also of a GPU's memory


def main(argv: Sequence[str] | None = None) -> None:
    flags, trainer_flags = parse_beside(_parser(), argv)
    name, description = read_description(flags.study)
    matrix = variants(description, flags.framework, trainer_flags)
    by_horovod = any(one.strategy == "horovod" for one in matrix)
    need_frameworks({one.framework for one in matrix}, horovod=by_horovod, by="allstep study")
    max_ranks = max(variant.num_ranks for variant in matrix)
    fitting = min(_MAX_AT_ONCE, max(1, len(os.sched_getaffinity(0)) // max_ranks))
    at_once = flags.at_once or (1 if description.alone else fitting)
    with OutputDirectory(flags.output_dir or Path("runs/studies") / name, warn=warn) as output:
        seeds = flags.seeds or description.seeds
        begun = begin(output.path, name, description, matrix, seeds=seeds, command=command("study", argv))
        result = run_lacking(output.path, begun, matrix, at_once=at_once, time_limit=flags.time_limit)
        for line in write_page(output.path, result):
            print_line(printable(line))


def _parser() -> Parser:
    parser = Parser("allstep study", __doc__)
    add = parser.add_argument
    add("study", type=nonempty_text, metavar="NAME", help=f"{', '.join(STUDIES)}, or a YAML file")
    add("--seeds", type=whole(1, MAX_SEEDS), metavar="N", help="trainings of each variant (default: the study's)")
    add("--framework", type=one_of(*FRAMEWORKS), help=f"{' or '.join(FRAMEWORKS)}, instead of the study's")
    at_once = "trainings at the same time (default: as many as fill the cores, at most 8)"
    add("--at-once", type=local_ranks(), metavar="N", help=at_once)
    add("--time-limit", type=whole(1, WEEK), default=3600, metavar="SECONDS", help="limit of one training (an hour)")
    add("--output-dir", type=nonempty_path, metavar="DIR", help="default: runs/studies/NAME")
    return parser


PAGE = "study.md"


def write_page(directory: Path, result: StudyResult) -> list[str]:
    """Write study.md, and each figure as SVG and PNG; return the outcome as lines for the terminal."""
    section = study(result)
    names = [f"figure-{number}" for number, _ in enumerate(section.figures, 1)]
    figures = [figure.save(directory / name) for name, figure in zip(names, section.figures, strict=True)]
    saved = dataclasses.replace(section, figures=figures)
    with write_atomically(directory / PAGE) as stream:
        stream.write(render("report.md", f"allstep study {result.name}", [saved], []).encode())
    written = f"written to {directory / PAGE}: allstep report {directory} includes it"
    return [*section.items, outcome(judge(result)), written]
