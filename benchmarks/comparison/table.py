"""The table that a person reads at the end of a comparison."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from operator import itemgetter

from allstep.benchmarks.comparison.cells import OF_TABLE
from allstep.benchmarks.comparison.ranking import sentence
from allstep.benchmarks.comparison.samples import resolution

_WIDTH = 150  # where the output is no terminal
_MIB = 2**20


def print_tables(cells: Sequence[dict], rules: Sequence[str]) -> None:
    """One table for each workload, model and batch size; a row for each cell."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    for (workload, model, batch_size, precision), of_table in itertools.groupby(cells, itemgetter(*OF_TABLE)):
        of_table = list(of_table)
        console.print(_table(f"{workload}: {model}, {batch_size} images a step on one rank, {precision}", of_table))
        for cell in of_table:
            if told := note(cell):
                place = f"{cell['framework']} {cell['strategy']} on {cell['ranks']}"
                console.print(f"  {place}: {told}", markup=False, highlight=False, soft_wrap=True)
        for told in filter(None, (sentence(of_table), resolution(of_table))):
            console.print(told, highlight=False, soft_wrap=True)
    console.print("Medians; +- is the 95 % confidence interval of the mean, spread the standard deviation of a launch.")
    console.print(f"Efficiencies are ratios within a round; compare.json has all {len(rules)} rules.")


def _table(title: str, cells: Sequence[dict]):
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    is_real = cells[0]["input"] == "real"
    for name in ("framework", "strategy"):
        table.add_column(name)
    columns = ["ranks", "images/s", "mean", "+-", "spread", "of 1 rank", "of single", "of limit"]
    columns += [f"of {cells[0]['framework']}", "MiB a rank"]
    for name in [*columns, f"s to {cells[0]['target_accuracy']:.0%}" if is_real else "start-up s"]:
        table.add_column(name, justify="right")
    for cell in cells:
        table.add_row(*_row(cell, "seconds_to_target" if is_real else "startup_seconds"))
    return table


def _row(cell: dict, last: str) -> list[str]:
    rate, efficiency = cell["images_per_second"], cell["efficiency"] or {}
    figures = [cell["status"], "", "", ""]
    if rate:
        figures = [
            *(f"{rate['median']:.0f}", f"{rate['mean']:.0f}", f"{rate['high'] - rate['mean']:.0f}"),
            f"{rate['stdev'] / rate['mean']:.1%}",
        ]
    shares = [
        f"{efficiency[name]['median']:.2f}" if name in efficiency else ""
        for name in ("same_strategy_one_rank", "single_process", "independent", "first_framework")
    ]
    memory = max(cell["peak_memory_bytes_by_rank"] or [0]) / _MIB
    return [
        *(cell["framework"], cell["strategy"], str(cell["ranks"]), *figures, *shares),
        f"{memory:.0f}" if memory else "",
        f"{cell[last]['median']:.2f}" if cell[last] else "",
    ]


def note(cell: dict) -> str:
    """What a reader has to know of a cell besides its figures."""
    told = []
    if cell["status"] != "ok":
        told.append(f"{cell['status']}: {cell['reason']}" if cell["reason"] else cell["status"])
    if cell["images_per_second"] and not cell["comparable"]:
        told.append(f"not compared: {cell['gate']['reason']}")
    return "; ".join(told)
