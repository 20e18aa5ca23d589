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


def rankings(cells: Sequence[dict]) -> dict[tuple, str]:
    """By place: its strategies, the largest share of the limit first, where there are several.

    `a > b ~ c`: the strategies before `>` are each faster than each behind it; `~` joins those of which that is not
    known.

    Args:
        cells: as the file format has them.
    """
    found = {}
    measured = sorted((cell for cell in cells if share_of_limit(cell)), key=place_of)
    for place, of_place in itertools.groupby(measured, key=place_of):
        ranked = sorted(of_place, key=lambda cell: share_of_limit(cell)["median"], reverse=True)
        if len(ranked) > 1:
            found[place] = _text(ranked)
    return found


def place_of(cell: dict) -> tuple:
    return tuple(cell[name] for name in OF_PLACE)


def sentence(cells: Sequence[dict]) -> str:
    """The rankings of a table; empty where there is none."""
    told = [f"{framework} on {ranks}: {text}" for (_, framework, *_, ranks), text in rankings(cells).items()]
    return f"{'; '.join(told)} (> is faster, ~ not told apart)." if told else ""


def _same_place(cell: Cell, other: Cell) -> bool:
    return all(getattr(cell, name) == getattr(other, name) for name in OF_PLACE)


def _text(ranked: Sequence[dict]) -> str:
    text = ranked[0]["strategy"]
    for number, cell in enumerate(ranked[1:], 1):
        apart = all(is_faster(one, other["strategy"]) for one in ranked[:number] for other in ranked[number:])
        text += f" {'>' if apart else '~'} {cell['strategy']}"
    return text
