"""Do the ranks share the data set: every sample once, on one rank, in another order each epoch?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from allstep.commands.prove.checks import sharing
from allstep.commands.prove.findings import Finding, listed, ranks
from allstep.commands.prove.records import Forward, Loop
from allstep.commands.prove.runs import Rank, Run, Runs

_MOST = 0.5
"""Share of a batch that another rank has as well, from which on it is the same batch."""


def check(runs: Runs) -> Iterator[Finding]:
    """Compare the samples of the ranks."""
    run = runs.together
    if run.num_ranks == 1:
        return
    if (finding := _same_samples(run)) or isinstance(finding := sharing.judge(runs), Finding):
        yield finding
    if finding := _uneven(run):
        yield finding
    if finding := _same_order(run.ranks[0]):
        yield finding


def batches(forwards: Sequence[Forward]) -> dict[int, list[str]]:
    """The samples of each step."""
    found: dict[int, list[str]] = {}
    for forward in forwards:
        found.setdefault(forward.step, []).extend(forward.rows)
    return found


def overlap(first: Sequence[str], second: Sequence[str]) -> float:
    """The share of the shorter batch that the other one has as well."""
    minimum = min(len(set(first)), len(set(second)))
    return len({*first} & {*second}) / minimum if minimum else 0.0


def _same_samples(run: Run) -> Finding | None:
    steps = [batches(rank.forwards(training=True)) for rank in run.ranks]
    common = sorted(set(steps[0]).intersection(*steps[1:]))
    for first in range(run.num_ranks):
        for second in range(first + 1, run.num_ranks):
            same = [step for step in common if overlap(steps[first][step], steps[second][step]) > _MOST]
            if len(same) * 2 > len(common):
                loops = run.ranks[0].training_loops
                num_samples = len({*steps[first][same[0]]} & {*steps[second][same[0]]})
                return Finding(
                    "same-samples",
                    "ranks train on the same samples: more ranks do the same work, and no more",
                    f"in {len(same)} of {len(common)} steps, {ranks((first, second))} had the same samples "
                    f"({num_samples} of {len(steps[first][same[0]])} in step {same[0]})",
                    sharing.mend(run.ranks[0]),
                    loops[0].line if loops else "",
                )
    return None


def _uneven(run: Run) -> Finding | None:
    """Loops that train on some rank; one that has no batch at all calls no model."""
    for together in zip(*(rank.all(Loop) for rank in run.ranks), strict=False):
        numbers, lines = [loop.num_batches for loop in together], {loop.line for loop in together}
        if None not in numbers and len(set(numbers)) > 1 == len(lines) and any(map(_trains, run.ranks, together)):
            return Finding(
                "uneven-batches",
                "ranks have different numbers of batches: those with more wait for the others for ever",
                f"an epoch has {listed(numbers)} batches on {ranks(range(len(numbers)))}",
                "give all ranks the same number: DistributedSampler fills the last batch, drop_last=True, hvd.join()",
                together[0].line,
            )
    return None


def _trains(rank: Rank, loop: Loop) -> bool:
    return any(forward.loop == loop.number for forward in rank.forwards(training=True))


def _same_order(rank: Rank) -> Finding | None:
    loops = rank.training_loops
    if len(loops) < 2 or not loops[0].sampler or not loops[0].sampler.shuffles:
        return None
    first, second = (rank.indices(loop) for loop in loops[:2])
    if not first or first[: len(second)] != second[: len(first)]:
        return None
    return Finding(
        "same-order",
        "every epoch has the same order of samples: set_epoch was forgotten",
        f"both epochs begin with the indices {listed(first)}; the sampler's epoch was {loops[1].sampler.epoch} in both"
        if loops[1].sampler
        else "",
        "at the start of each epoch: sampler.set_epoch(epoch)",
        loops[1].line,
    )
