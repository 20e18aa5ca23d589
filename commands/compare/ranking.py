"""Ranking of strategies by speed, as far as a comparison can distinguish them, and the same in plain sentences."""

import itertools
from collections.abc import Sequence

from allstep.commands.compare.cells import INDEPENDENT, Cell
from allstep.commands.compare.records import CellResult
from allstep.commands.compare.samples import Samples, ratios
from allstep.commands.shared.measure import Estimate


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


def _groups(ranked: Sequence[CellResult]) -> list[list[CellResult]]:
    found = [[ranked[0]]]
    for number, cell in enumerate(ranked[1:], 1):
        if all(is_faster(one, other.strategy) for one in ranked[:number] for other in ranked[number:]):
            found.append([])
        found[-1].append(cell)
    return found


def answers(cells: Sequence[CellResult], *, is_short: bool = False) -> list[str]:
    """Return a sentence for each framework and number of ranks of a table, and one for each other framework.

    `is_short` leaves out all but the largest number of ranks on which a framework has a ranking.
    """
    comparable = [cell for cell in cells if cell.comparable]
    found = {
        cell.framework if is_short else cell.placement: _strategies([cell, *others], later)
        for (cell, *others), *later in groups(comparable).values()  # more ranks follow fewer
    }
    return [*found.values(), *filter(None, (_frameworks(cell, comparable) for cell in comparable))]


def _strategies(fastest: Sequence[CellResult], later: Sequence[Sequence[CellResult]]) -> str:
    """Return the sentence about the strategies of one framework on as many ranks."""
    best, names = fastest[0], [cell.strategy for cell in fastest]
    leads = _listed([_lead(best, cell) for cell in itertools.chain(*later)])
    if len(fastest) == 1:
        text = f"{best.strategy} is the fastest, {leads}"
    elif difference := _largest_difference(fastest):
        text = f"{_listed(names)} are equally fast as far as is known: they differ by at most {difference:.1%}"
    else:
        text = f"{_listed(names)} were measured too few times to say which is the fastest"
    if leads and len(fastest) > 1:
        text += f"; {best.strategy} is {leads}"
    return f"{best.framework} on {ranks_of(best)}: {text}."


def _lead(one: CellResult, other: CellResult) -> str:
    ratio = one.against[other.strategy]
    return f"{ratio.mean - 1:.1%} faster than {other.strategy} ({ratio.low - 1:.1%} to {ratio.high - 1:.1%}, 95%)"


def _largest_difference(cells: Sequence[CellResult]) -> float | None:
    """Return the largest difference that the intervals of the cells' ratios allow; None if one ratio has none."""
    ratios = [one.against.get(other.strategy) for one, other in itertools.combinations(cells, 2)]
    if not all(ratio and ratio.num > 1 for ratio in ratios):
        return None
    return max(max(ratio.high - 1, 1 - ratio.low) for ratio in ratios if ratio)


def _frameworks(cell: CellResult, cells: Sequence[CellResult]) -> str:
    """Return how a cell's speed compares with that of the first framework by the same strategy; empty if unknown.

    Independent processes are named only where the frameworks have no other strategy in common.
    """
    ratio = (cell.efficiency or {}).get("first_framework")
    first = cells[0].framework
    if ratio is None or cell.framework == first or cell.ranks != max(one.ranks for one in cells):
        return ""
    shared = {one.strategy for one in cells if one.framework == first and one.ranks == cell.ranks}
    shared &= {one.strategy for one in cells if one.framework == cell.framework and one.ranks == cell.ranks}
    if cell.strategy == INDEPENDENT and shared > {INDEPENDENT}:
        return ""
    return f"{cell.strategy} on {ranks_of(cell)}: {_faster(cell.framework, first, ratio)}."


def _faster(name: str, first: str, ratio: Estimate) -> str:
    if ratio.num < 2:
        return f"{name} had {ratio.mean:.2f} times the speed of {first} in one measurement, which proves nothing"
    span = f"{ratio.low:.2f} to {ratio.high:.2f}"
    if ratio.low <= 1 <= ratio.high:
        return f"{name} and {first} are equally fast as far as is known: {name} has {span} times the speed of {first}"
    if ratio.mean > 1:
        return f"{name} is {ratio.mean - 1:.1%} faster than {first} ({span} times its speed, 95%)"
    return f"{name} is {1 - ratio.mean:.1%} slower than {first} ({span} times its speed, 95%)"


def _listed(texts: Sequence[str]) -> str:
    if not texts:
        return ""
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))


def ranks_of(cell: CellResult) -> str:
    """Return the number of ranks of a cell in words."""
    return f"{cell.ranks} rank{'s' if cell.ranks > 1 else ''}"
