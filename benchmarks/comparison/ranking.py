"""Which strategy is faster than which others, as far as a comparison can tell them apart."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from allstep.benchmarks.comparison.cells import INDEPENDENT, Cell
from allstep.benchmarks.comparison.samples import Samples, ratios, share_of_limit

OF_PLACE = ("workload", "framework", "model", "batch_size", "precision", "ranks")
"""What strategies that are ranked against each other have in common."""


def against(cell: Cell, cells: Sequence[Cell], samples: Samples, comparable: set[str]) -> dict[str, dict]:
    """By strategy, statistics of a cell's speed over that of its rivals, as the file format has them."""
    if cell.strategy == INDEPENDENT:
        return {}
    rivals = [one for one in cells if one.strategy not in (INDEPENDENT, cell.strategy) and _same_place(cell, one)]
    found = {rival.strategy: ratios(cell, rival, samples, comparable) for rival in rivals}
    return {strategy: ratio for strategy, ratio in found.items() if ratio}


def is_faster(cell: dict, rival: str) -> bool:
    """Whether a cell is faster than another strategy: the 95 % confidence interval of their ratio's mean is above 1."""
    ratio = cell["against"].get(rival)
    return ratio is not None and ratio["num"] > 1 and ratio["low"] > 1


def groups(cells: Sequence[dict]) -> dict[tuple, list[list[dict]]]:
    """By place: its cells in groups, the fastest group first, where there are several cells.

    Each cell of a group is faster than each of the groups behind it; which is the fastest within a group is not known.
    The cells of a place stand in the order of their shares of the limit, the largest first.

    Args:
        cells: as the file format has them.
    """
    found = {}
    measured = sorted((cell for cell in cells if share_of_limit(cell)), key=place_of)
    for place, of_place in itertools.groupby(measured, key=place_of):
        ranked = sorted(of_place, key=_median_share, reverse=True)
        if len(ranked) > 1:
            found[place] = _groups(ranked)
    return found


def rankings(cells: Sequence[dict]) -> dict[tuple, str]:
    """By place: its groups in words. In `a > b ~ c`, `>` stands between groups and `~` between cells of one group."""
    return {
        place: " > ".join(" ~ ".join(cell["strategy"] for cell in group) for group in found)
        for place, found in groups(cells).items()
    }


def _median_share(cell: dict) -> float:
    share = share_of_limit(cell)
    assert share is not None
    return share["median"]


def place_of(cell: dict) -> tuple:
    return tuple(cell[name] for name in OF_PLACE)


def sentence(cells: Sequence[dict]) -> str:
    """The rankings of a table; empty where there is none."""
    told = [f"{framework} on {ranks}: {text}" for (_, framework, *_, ranks), text in rankings(cells).items()]
    return f"{'; '.join(told)} (> is faster, ~ not told apart)." if told else ""


def _same_place(cell: Cell, other: Cell) -> bool:
    return all(getattr(cell, name) == getattr(other, name) for name in OF_PLACE)


def _groups(ranked: Sequence[dict]) -> list[list[dict]]:
    found = [[ranked[0]]]
    for number, cell in enumerate(ranked[1:], 1):
        if all(is_faster(one, other["strategy"]) for one in ranked[:number] for other in ranked[number:]):
            found.append([])
        found[-1].append(cell)
    return found
