"""Runner of the benchmarks: their flags and processes, the table, the file of samples and the exit status."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from allstep.benchmarks.figures import print_table, save
from allstep.commands.shared.jobs import scratch_folder
from allstep.commands.shared.measure import job
from allstep.commands.shared.records.files import output_file
from allstep.commands.shared.records.measured import Figure
from allstep.common.base.flag_types import MAX_ROUNDS, Parser, listed, one_of, whole
from allstep.common.catalog.strategies import FRAMEWORKS

Measure = Callable[[str, argparse.Namespace, Path], tuple[Sequence[Figure], object]]
"""Function of a framework, the flags and a temporary folder that returns rows of the table and raw samples."""


def benchmark(
    name: str,
    description: str | None,
    measure: Measure,
    *,
    frameworks: Sequence[str] = FRAMEWORKS,
    rounds: int | None = None,
    flags: Mapping[str, dict[str, Any]] | None = None,
    programs: Sequence[Callable[..., object]] = (),
) -> Callable[..., None]:
    """Return the `main` of a benchmark, which exits with status 1 if a target is missed.

    Args:
        frameworks: those that it can measure, one after the other; --frameworks chooses if there are several.
        rounds: default of --rounds; None for a benchmark without that flag.
        flags: further flags, with argparse's arguments.
        programs: functions that `program` names, which take words.
    """
    known = dict(flags or {})
    known["--output"] = {"type": output_file, "default": f"runs/{name}.json", "help": "where samples are kept"}
    if len(frameworks) > 1:
        known["--frameworks"] = {"type": listed(one_of(*frameworks)), "default": frameworks, "metavar": "NAME,..."}
    if rounds is not None:
        kind, text = whole(1, MAX_ROUNDS), f"rounds ({rounds})"
        known["--rounds"] = {"type": kind, "default": rounds, "metavar": "N", "help": text}

    def main(argv: Sequence[str] | None = None) -> None:
        words = sys.argv[1:] if argv is None else list(argv)
        if words[:1] == ["--inside"]:
            {one.__name__: one for one in programs}[words[1]](*words[2:])
            return
        parser = Parser(f"python -m allstep.benchmarks.{name}", description)
        for flag, options in known.items():
            parser.add_argument(flag, **options)
        given = parser.parse_args(words)
        rows: list[Figure] = []
        samples = {}
        with scratch_folder(name) as folder:
            for framework in getattr(given, "frameworks", frameworks):
                found, samples[framework] = measure(framework, given, folder)
                rows += found
        print_table(rows)
        save(given.output, rows, samples)
        if not all(row.reached for row in rows):
            sys.exit(1)

    return main


def program(name: str, function: str, *arguments: object, num_ranks: int | None = None) -> list[str]:
    """Return the command that runs one of a benchmark's programs in processes of its own."""
    return job(f"allstep.benchmarks.{name}", "--inside", function, *arguments, num_ranks=num_ranks)


QUICK = {"--quick": {"action": "store_true", "help": "only a few steps, as a test of the benchmark"}}
