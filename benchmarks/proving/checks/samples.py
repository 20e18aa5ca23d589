"""Do the ranks share the data set: every sample once, on one rank, in another order each epoch?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from allstep.benchmarks.proving.findings import Finding, listed, ranks
from allstep.benchmarks.proving.records import Batch, Forward, Loop
from allstep.benchmarks.proving.runs import Rank, Run, Runs

_MOST = 0.5
"""Share of a batch that another rank has as well, from which on it is the same batch."""
_SOME = 0.05
"""Share of the indices that two ranks have both drawn, above what a sampler repeats to fill its last batch."""


def check(runs: Runs) -> Iterator[Finding]:
    """Compare the samples of the ranks."""
    run = runs.together
    if run.num_ranks == 1:
        return
    loops = [training_loops(rank) for rank in run.ranks]
    if (finding := _same_samples(run)) or (finding := _not_shared(runs, loops)):
        yield finding
    if finding := _uneven(run):
        yield finding
    if finding := _same_order(run.ranks[0], loops[0]):
        yield finding


def training_loops(rank: Rank) -> list[Loop]:
    """The loops during which the rank stepped, in order."""
    trained = {step.loop for step in rank.steps()}
    return [loop for loop in rank.all(Loop) if loop.number in trained]


def batches(forwards: Sequence[Forward]) -> dict[int, list[str]]:
    """The samples of each step."""
    found: dict[int, list[str]] = {}
    for forward in forwards:
        found.setdefault(forward.step, []).extend(forward.rows)
    return found


def overlap(first: Sequence[str], second: Sequence[str]) -> float:
    """The share of the shorter batch that the other one has as well."""
    least = min(len(set(first)), len(set(second)))
    return len({*first} & {*second}) / least if least else 0.0


def _same_samples(run: Run) -> Finding | None:
    steps = [batches(rank.forwards(training=True)) for rank in run.ranks]
    common = sorted(set(steps[0]).intersection(*steps[1:]))
    for first in range(run.num_ranks):
        for second in range(first + 1, run.num_ranks):
            same = [step for step in common if overlap(steps[first][step], steps[second][step]) > _MOST]
            if len(same) * 2 > len(common):
                loops = training_loops(run.ranks[0])
                num_samples = len({*steps[first][same[0]]} & {*steps[second][same[0]]})
                return Finding(
                    "same-samples",
                    "ranks train on the same samples: more ranks do the same work, and no more",
                    f"in {len(same)} of {len(common)} steps, {ranks((first, second))} had the same samples "
                    f"({num_samples} of {len(steps[first][same[0]])} in step {same[0]})",
                    _sharing(run.ranks[0]),
                    loops[0].line if loops else "",
                )
    return None


def _not_shared(runs: Runs, loops: Sequence[Sequence[Loop]]) -> Finding | None:
    """Ranks that draw from the whole data set, each in its own order."""
    if not all(loops):
        return None
    first = [own[0] for own in loops]
    own_ranks = runs.together.ranks
    indices, rows = ([draw(r, o) for r, o in zip(own_ranks, first, strict=True)] for draw in (_indices, _rows))
    # A rank that cuts its share out of the data before has indices that mean other samples.
    is_same_data = bool({*rows[0]} & {*rows[1]}) or all(one.sampler and one.sampler.num_replicas for one in first)
    repeated = {*indices[0]} & {*indices[1]}
    if not is_same_data:
        return None
    if len(repeated) > _SOME * len(indices[0]):
        evidence = (
            f"of the first {len(indices[0])} samples of {ranks((0, 1))}, {len(repeated)} were drawn by both "
            f"(indices {listed(sorted(repeated))})"
        )
    elif {*rows[0]} & {*rows[1]} and _num_batches(runs.alone) == first[0].num_batches is not None:
        evidence = (
            f"an epoch has {first[0].num_batches} batches on each of {len(own_ranks)} ranks, as on one, and "
            f"{len({*rows[0]} & {*rows[1]})} of the first {len(rows[0])} samples were those of another rank"
        )
    else:
        return None
    seeds = [one.sampler.seed for one in first if one.sampler and one.sampler.num_replicas]
    mend = f"give the DistributedSampler of every rank the same seed; received {listed(seeds)}"
    return Finding(
        "samples-overlap",
        "ranks do not share the data set: samples are repeated on other ranks, and others missed, in every epoch",
        evidence,
        mend if len(set(seeds)) > 1 else _sharing(own_ranks[0]),
        first[0].line,
    )


def _num_batches(alone: Run | None) -> int | None:
    """Of an epoch on one rank."""
    loops = training_loops(alone.ranks[0]) if alone else []
    return loops[0].num_batches if loops else None


def _rows(rank: Rank, loop: Loop) -> list[str]:
    return [row for one in rank.forwards(training=True) if one.loop == loop.number for row in one.rows]


def _indices(rank: Rank, loop: Loop) -> list[int]:
    return [index for batch in rank.all(Batch) if batch.loop == loop.number for index in batch.indices]


def _sharing(rank: Rank) -> str:
    size = "hvd.size(), rank=hvd.rank()" if "horovod" in rank.library else "dist.get_world_size(), rank=dist.get_rank()"
    if rank.library == "tf.distribute":
        return "loop over strategy.experimental_distribute_dataset(dataset), which gives each replica its share"
    loops = training_loops(rank)
    if loops and loops[0].sampler and loops[0].sampler.num_replicas:
        return f"DistributedSampler(data, num_replicas={size}), with this job's numbers"
    if loops and loops[0].sampler:
        return f"DataLoader(data, sampler=DistributedSampler(data, num_replicas={size}))"
    return "give each rank its own share: data[rank::size], or dataset.shard(size, rank)"


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


def _same_order(rank: Rank, loops: Sequence[Loop]) -> Finding | None:
    if len(loops) < 2 or not loops[0].sampler or not loops[0].sampler.shuffles:
        return None
    first, second = (_indices(rank, loop) for loop in loops[:2])
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
