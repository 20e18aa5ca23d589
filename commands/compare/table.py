"""The tables printed at the end of a comparison."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from operator import attrgetter

from allstep.commands.compare.ranking import answers
from allstep.commands.compare.records import CellResult
from allstep.commands.compare.samples import resolution
from allstep.commands.shared.estimate import Estimate

_WIDTH = 150  # if the output is not a terminal
_MIB = 2**20


def print_tables(cells: Sequence[CellResult], rules: Sequence[str]) -> None:
    """Print one table for each workload, model and batch size, with a row for each cell."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    for (workload, model, batch_size, arithmetic), group in itertools.groupby(cells, attrgetter("table")):
        rows = list(group)
        console.print(_table(f"{workload}: {model}, {batch_size} images a step on one rank, {arithmetic}", rows))
        for cell in rows:
            if remark := note(cell):
                placement = f"{cell.framework} {cell.strategy} on {cell.ranks}"
                console.print(f"  {placement}: {remark}", markup=False, highlight=False, soft_wrap=True)
        for line in filter(None, (*answers(rows), resolution(rows))):
            console.print(line, highlight=False, soft_wrap=True)
    console.print("Medians; +- is the 95 % confidence interval of the mean, spread the standard deviation of a launch.")
    console.print(f"Efficiencies are ratios within a round; compare.json has all {len(rules)} rules.")


def _table(title: str, cells: Sequence[CellResult]):
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    is_real = cells[0].input == "real"
    for name in ("framework", "strategy"):
        table.add_column(name)
    columns = ["ranks", "images/s", "mean", "+-", "spread", "of 1 rank", "of single", "of limit"]
    columns += [f"of {cells[0].framework}", "MiB a rank"]
    columns.append(f"s to {cells[0].target_accuracy:.0%}" if is_real else "start-up s")
    more = further_columns(cells)
    for name in (*columns, *more):
        table.add_column(name, justify="right")
    for cell, *texts in zip(cells, *more.values(), strict=True):
        table.add_row(*_row(cell, cell.seconds_to_target if is_real else cell.startup_seconds), *texts)
    return table


def _row(cell: CellResult, seconds: Estimate | None) -> list[str]:
    rate, efficiency = cell.images_per_second, cell.efficiency or {}
    figures = [cell.status, "", "", ""]
    if rate:
        figures = [
            *(f"{rate.median:.0f}", f"{rate.mean:.0f}", f"{rate.high - rate.mean:.0f}"),
            f"{rate.stdev / rate.mean:.1%}",
        ]
    shares = [
        f"{efficiency[name].median:.2f}" if name in efficiency else ""
        for name in ("same_strategy_one_rank", "single_process", "independent", "first_framework")
    ]
    memory = max(cell.peak_memory_bytes_by_rank or [0]) / _MIB
    return [
        *(cell.framework, cell.strategy, str(cell.ranks), *figures, *shares),
        f"{memory:.0f}" if memory else "",
        f"{seconds.median:.2f}" if seconds else "",
    ]


def further_columns(cells: Sequence[CellResult]) -> dict[str, list[str]]:
    """Return columns that only some tables have, by title: the gain of compiling, and energy if GPUs count it."""
    gains = [(cell.efficiency or {}).get("not_compiled") for cell in cells]
    columns = {"of uncompiled": gains, "J/image": [cell.joules_per_image for cell in cells]}
    return {
        title: [f"{value.median:.3g}" if value else "" for value in values]
        for title, values in columns.items()
        if any(values)
    }


def note(cell: CellResult) -> str:
    """Return what a reader must know about a cell besides its figures."""
    remarks = []
    if cell.status != "ok":
        remarks.append(f"{cell.status}: {cell.reason}" if cell.reason else cell.status)
    if cell.images_per_second and not cell.comparable:
        remarks.append(f"not compared: {cell.gate.reason}")
    return "; ".join(remarks)
