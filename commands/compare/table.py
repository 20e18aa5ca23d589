"""The table of cells, in a report and at the end of a comparison."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from allstep.commands.compare.ranking import answers
from allstep.commands.compare.records import CellResult
from allstep.commands.compare.samples import resolution
from allstep.commands.shared.page.document import Table, amount, mebibytes, median, print_table, share
from allstep.common.base.errors import printable
from allstep.common.base.terminal import print_line


def print_tables(cells: Sequence[CellResult], rules: Sequence[str]) -> None:
    """Print one table for each workload, model and batch size, with a row for each measured cell."""
    for (workload, model, batch_size, arithmetic), group in itertools.groupby(cells, attrgetter("table")):
        rows = list(group)
        title = f"{workload}: {model}, {batch_size} images a step on one rank, {arithmetic}"
        print_table(replace(table_of(rows), caption=title))
        for cell in rows:
            if remark := note(cell):
                print_line(printable(f"  {name_of(cell)} on {cell.ranks}: {remark}"))
        for line in filter(None, (*answers(rows), resolution(rows))):
            print_line(printable(line))
    print("Medians over repetitions; spread is the standard deviation of a launch. Efficiencies are ratios within a")
    print(f"round; compare.json has all {len(rules)} rules.")


def table_of(cells: Sequence[CellResult]) -> Table:
    """Return the table of the measured ones of some cells."""
    header = ["", "ranks", "images/s", "mean, 95%", "spread", "of the same on 1", "of plain", "of the limit"]
    header += [f"of {cells[0].framework}", "MiB", "start-up s", "to target s", "accuracy", "same curve"]
    rows = []
    measured = [(cell, cell.images_per_second) for cell in cells if cell.images_per_second]
    for cell, rate in measured:
        half = (rate.high - rate.low) / 2
        efficiencies = [
            share(efficiency_of(cell, name))
            for name in ("same_strategy_one_rank", "single_process", "independent", "first_framework")
        ]
        rows.append(
            [
                name_of(cell),
                str(cell.ranks),
                amount(rate.median),
                f"{amount(rate.mean)} ± {amount(half)}",
                amount(rate.stdev),
                *efficiencies,
                mebibytes(max(cell.peak_memory_bytes_by_rank or [0]) or None),
                amount(median(cell.startup_seconds)),
                amount(median(cell.seconds_to_target)),
                share(cell.final_accuracy),
                cell.gate.status,
            ]
        )
    # Columns that only some tables have: the gain of compiling, and energy if GPUs count it.
    gains = [(cell.efficiency or {}).get("not_compiled") for cell, _ in measured]
    for title, values in (("of uncompiled", gains), ("J/image", [cell.joules_per_image for cell, _ in measured])):
        if any(values):
            header.append(title)
            rows = [[*row, f"{value.median:.3g}" if value else ""] for row, value in zip(rows, values, strict=True)]
    return Table("Medians over repetitions; spread is the standard deviation of single ones.", header, rows)


def efficiency_of(cell: CellResult, name: str) -> float | None:
    """Return the median of an efficiency of `samples.efficiency`; None if it is unknown."""
    return median((cell.efficiency or {}).get(name))


def name_of(cell: CellResult) -> str:
    """Return framework and strategy of a cell."""
    return f"{cell.framework} {cell.strategy}"


def note(cell: CellResult) -> str:
    """Return what a reader must know about a cell besides its figures."""
    remarks = []
    if cell.status != "ok":
        remarks.append(f"{cell.status}: {cell.reason}" if cell.reason else cell.status)
    if cell.images_per_second and not cell.comparable:
        remarks.append(f"not compared: {cell.gate.reason}")
    return "; ".join(remarks)
