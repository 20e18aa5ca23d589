"""Check that two runs of `allstep compare` agree:

    allstep compare --output-dir runs/first
    allstep compare --output-dir runs/second
    python -m allstep.benchmarks.reproducibility runs/first runs/second

Prints, for every cell that both runs have, its share of the machine's limit in both (images/s over that of independent
processes in the same round, the median over rounds). For every framework and number of ranks in a table, it prints the
rankings of the strategies (`>` is faster, `~` not distinguished), and whether they contradict each other. Images/s
themselves are not compared, since the machine may be slower today. The last lines show the resolution of each run's
shares. The exit status is 0 if no share differs by more than 5 % and no ranking contradicts the other, 1 otherwise.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from allstep.commands.compare.records import SUMMARY, CellResult, ComparisonResult
from allstep.commands.compare.samples import resolution
from allstep.commands.compare.table import groups, is_faster
from allstep.commands.shared.records import files
from allstep.common.base.errors import UserError
from allstep.common.base.flag_types import Parser, nonempty_path
from allstep.common.process.exit import run_rank

BOUND = 0.05


def rankings(cells: Sequence[CellResult]) -> dict[tuple, str]:
    """Return the groups of each ranking in words: in `a > b ~ c`, `>` separates groups, `~` cells of one group."""
    return {
        ranking: " > ".join(" ~ ".join(cell.strategy for cell in group) for group in found)
        for ranking, found in groups(cells).items()
    }


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


def repetitions(first: Sequence[CellResult], second: Sequence[CellResult]) -> list[Repetition]:
    """Return the cells that were compared with independent processes in both runs."""
    shares = {cell.id: cell.share_of_limit for cell in first}
    again = {cell.id: cell.share_of_limit for cell in second}
    pairs = [(name, share, again.get(name)) for name, share in shares.items()]
    return [Repetition(name, one.median, two.median) for name, one, two in pairs if one and two]


def contradicted(first: Sequence[CellResult], second: Sequence[CellResult]) -> set[tuple]:
    """Return the rankings in which a strategy is faster than another in one run, and slower in the other."""
    found, again = (
        {(cell.ranking, cell.strategy, rival) for cell in cells for rival in cell.against if is_faster(cell, rival)}
        for cells in (first, second)
    )
    return {ranking for ranking, faster, slower in found if (ranking, slower, faster) in again}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table and exit with status 1 if the runs do not agree."""
    parser = Parser("python -m allstep.benchmarks.reproducibility", __doc__)
    parser.add_argument("directories", nargs=2, type=nonempty_path, metavar="DIR")
    flags = parser.parse_args(argv)
    first, second = (files.read_input(ComparisonResult, path / SUMMARY).cells for path in flags.directories)
    found, before, after = repetitions(first, second), rankings(first), rankings(second)
    if not found:
        raise UserError("expected two comparisons with cells in common, received none; repeat the same command")
    for one in found:
        print(f"{one.cell:64} {one.first:6.3f} {one.second:6.3f} {one.change:+7.1%}  {_verdict(one.holds)}")
    changed = contradicted(first, second)
    for cell in sorted(before.keys() & after.keys()):
        print(f"{'.'.join(map(str, cell)):64} {before[cell]}; {after[cell]}  {_verdict(cell not in changed)}")
    for directory, cells in zip(flags.directories, (first, second), strict=True):
        print(f"{directory}: {resolution(cells)}")
    sys.exit(0 if not changed and all(one.holds for one in found) else 1)


def _verdict(holds: bool) -> str:
    return "yes" if holds else "NO"


if __name__ == "__main__":
    run_rank(main)
