"""Whether two runs of `allstep compare` tell the same:

    allstep compare --output-dir runs/first
    allstep compare --output-dir runs/second
    python -m allstep.benchmarks.proofs.reproducibility runs/first runs/second

For every cell that both have: its share of the machine's limit (images/s over that of independent processes in the same
round, the median over rounds) in both runs; and for every place in the table, the strategies' rankings (`>` is faster,
`~` not told apart), and whether a strategy is faster than another in one and slower in the other. Images/s themselves
follow the machine, which may be slower today. How well each run knew its shares stands below. The exit status is 0
where no share differs by more than 5 % and no ranking contradicts the other, 1 else.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from allstep.benchmarks.comparison import results
from allstep.benchmarks.comparison.ranking import is_faster, place_of, rankings
from allstep.benchmarks.comparison.samples import resolution, share_of_limit
from allstep.benchmarks.comparison.shapes import shares_cell
from allstep.common.config.flags import Parser, nonempty_path
from allstep.common.files.schema import list_of, record
from allstep.common.process.errors import UserError
from allstep.common.process.exit import run_rank

BOUND = 0.05


@dataclass(frozen=True)
class Repetition:
    """A share of the limit in two runs."""

    cell: str
    first: float
    second: float

    @property
    def change(self) -> float:
        return self.second / self.first - 1

    @property
    def holds(self) -> bool:
        return abs(self.change) <= BOUND


def repetitions(first: Sequence[dict], second: Sequence[dict]) -> list[Repetition]:
    """The cells of two runs that are compared with independent processes in both."""
    shares = [{cell["id"]: share for cell in cells if (share := _share(cell))} for cells in (first, second)]
    return [Repetition(name, share, shares[1][name]) for name, share in shares[0].items() if name in shares[1]]


def contradicted(first: Sequence[dict], second: Sequence[dict]) -> set[tuple]:
    """The places where a strategy is faster than another in one run, and slower in the other."""
    told, again = (
        {
            (place_of(cell), cell["strategy"], rival)
            for cell in cells
            for rival in cell["against"]
            if is_faster(cell, rival)
        }
        for cells in (first, second)
    )
    return {place for place, faster, slower in told if (place, slower, faster) in again}


def _share(cell: dict) -> float | None:
    share = share_of_limit(cell)
    return share["median"] if share else None


def main() -> None:
    parser = Parser("python -m allstep.benchmarks.proofs.reproducibility", __doc__)
    parser.add_argument("directories", nargs=2, type=nonempty_path, metavar="DIR")
    flags = parser.parse_args()
    first, second = map(_cells, flags.directories)
    found, before, after = repetitions(first, second), rankings(first), rankings(second)
    if not found:
        raise UserError("expected two comparisons with cells in common, received none; repeat the same command")
    for one in found:
        print(f"{one.cell:64} {one.first:6.3f} {one.second:6.3f} {one.change:+7.1%}  {_verdict(one.holds)}")
    changed = contradicted(first, second)
    for place in sorted(before.keys() & after.keys()):
        print(f"{'.'.join(map(str, place)):64} {before[place]}; {after[place]}  {_verdict(place not in changed)}")
    for directory, cells in zip(flags.directories, (first, second), strict=True):
        print(f"{directory}: {resolution(cells)}")
    sys.exit(0 if not changed and all(one.holds for one in found) else 1)


def _cells(directory: Path) -> list[dict]:
    shape = record(cells=list_of(shares_cell))
    return results.read_input(directory / results.SUMMARY, results.FORMAT, shape)["cells"]


def _verdict(holds: bool) -> str:
    return "yes" if holds else "NO"


if __name__ == "__main__":
    run_rank(main)
