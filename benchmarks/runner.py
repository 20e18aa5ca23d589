"""Flags and conclusion that the benchmarks have in common."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from allstep.commands.shared.measure import print_table, save
from allstep.commands.shared.records.figures import Figure
from allstep.commands.shared.records.files import output_file
from allstep.common.base.flag_types import MAX_ROUNDS, Parser, listed, one_of, whole
from allstep.common.catalog.strategies import FRAMEWORKS


def benchmark_parser(name: str, description: str | None, *, rounds: int | None = None) -> Parser:
    """Return a parser with --frameworks, --output, and --rounds unless the benchmark has no `rounds`."""
    parser = Parser(f"python -m allstep.benchmarks.{name}", description)
    parser.add_argument("--frameworks", type=listed(one_of(*FRAMEWORKS)), default=FRAMEWORKS, metavar="NAME,...")
    parser.add_argument("--output", type=output_file, default=f"runs/{name}.json", help="where samples are kept")
    if rounds is not None:
        parser.add_argument(
            "--rounds", type=whole(1, MAX_ROUNDS), default=rounds, metavar="N", help=f"rounds ({rounds})"
        )
    return parser


def conclude(output: Path, rows: Sequence[Figure], samples: Mapping[str, object], *, holds: bool = True) -> None:
    """Print the table and keep the samples; exit with status 1 if a target is missed or another check does not hold."""
    print_table(rows)
    save(output, rows, samples)
    if not (holds and all(row.reached for row in rows)):
        sys.exit(1)
