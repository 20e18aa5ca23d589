"""Ranking of strategies by speed, as far as a comparison can distinguish them."""

from __future__ import annotations

from collections.abc import Sequence

from allstep.commands.compare.cells import INDEPENDENT, Cell
from allstep.commands.compare.records import CellResult
from allstep.commands.compare.samples import Samples, ratios
from allstep.commands.shared.estimate import Estimate


def against(cell: Cell, cells: Sequence[Cell], samples: Samples, comparable: set[str]) -> dict[str, Estimate]:
    """Return statistics of a cell's speed over that of each rival, by strategy."""
    if cell.strategy == INDEPENDENT:
        return {}
    rivals = [
        one for one in cells if one.strategy not in (INDEPENDENT, cell.strategy) and one.placement == cell.placement
    ]
    found = {rival.strategy: ratios(cell, rival, samples, comparable) for rival in rivals}
    return {strategy: ratio for strategy, ratio in found.items() if ratio}


def is_faster(cell: CellResult, rival: str) -> bool:
    """Return whether a cell is faster than another strategy: the 95 % interval of their ratio's mean is above 1."""
    ratio = cell.against.get(rival)
    return ratio is not None and ratio.num > 1 and ratio.low > 1


def groups(cells: Sequence[CellResult]) -> dict[tuple, list[list[CellResult]]]:
    """Return the cells of each place that has several, in groups, the fastest group first.

    Each cell of a group is faster than all cells of later groups; which is the fastest within a group is unknown.
    The cells of a place are in the order of their shares of the limit, the largest first.
    """
    places: dict[tuple, list[tuple[float, CellResult]]] = {}
    for cell in sorted(cells, key=lambda cell: cell.placement):
        if share := cell.share_of_limit:
            places.setdefault(cell.placement, []).append((share.median, cell))
    found = {}
    for placement, measured in places.items():
        ranked = [cell for _, cell in sorted(measured, key=lambda pair: pair[0], reverse=True)]
        if len(ranked) > 1:
            found[placement] = _groups(ranked)
    return found


def rankings(cells: Sequence[CellResult]) -> dict[tuple, str]:
    """Return the groups of each place in words: in `a > b ~ c`, `>` separates groups, `~` cells of one group."""
    return {
        placement: " > ".join(" ~ ".join(cell.strategy for cell in group) for group in found)
        for placement, found in groups(cells).items()
    }


def _groups(ranked: Sequence[CellResult]) -> list[list[CellResult]]:
    found = [[ranked[0]]]
    for number, cell in enumerate(ranked[1:], 1):
        if all(is_faster(one, other.strategy) for one in ranked[:number] for other in ranked[number:]):
            found.append([])
        found[-1].append(cell)
    return found
