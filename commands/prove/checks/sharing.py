"""Does each rank read a share of the data set of its own, or all of it in an order of its own?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from allstep.commands.prove.findings import Finding, listed, ranks
from allstep.commands.prove.records import Held, Loop
from allstep.commands.prove.runs import Rank, Run, Runs

_SOME = 0.05
"""Share of the indices that two ranks have both drawn, above what a sampler repeats to fill its last batch."""
_FIRST_STEPS = 3
"""Of a loop whose epochs nobody can tell apart: more may be those of two epochs, which may have the same samples."""


def judge(runs: Runs) -> Finding | str | None:
    """What is wrong with how ranks share the data set; a line of what may be, where the steps do not show it."""
    run = runs.together
    loops = [rank.training_loops for rank in run.ranks]
    if run.num_ranks == 1:
        return None
    if not all(loops):
        return _without_loops(run)
    first = [own[0] for own in loops]
    if any(rank.indices(loop) for rank, loop in zip(run.ranks, first, strict=True)):
        return _by_samplers(runs, first)
    return _by_lengths(runs, first)


def mend(rank: Rank) -> str:
    """What gives each rank its share."""
    size = "hvd.size(), rank=hvd.rank()" if "horovod" in rank.library else "dist.get_world_size(), rank=dist.get_rank()"
    if rank.library == "tf.distribute":
        return "loop over strategy.experimental_distribute_dataset(dataset), which gives each replica its share"
    loops = rank.training_loops
    if loops and loops[0].sampler and loops[0].sampler.num_replicas:
        return f"DistributedSampler(data, num_replicas={size}), with this job's numbers"
    if loops and loops[0].sampler:
        return f"DataLoader(data, sampler=DistributedSampler(data, num_replicas={size}))"
    return "give each rank its own share: data[rank::size], or dataset.shard(size, rank)"


def _by_samplers(runs: Runs, first: Sequence[Loop]) -> Finding | str | None:
    """Of loaders of PyTorch, whose samplers say what they draw in an epoch."""
    local_ranks = runs.together.ranks
    indices = [rank.indices(loop) for rank, loop in zip(local_ranks, first, strict=True)]
    samplers = [loop.sampler for loop in first if loop.sampler]
    if indices[0] == indices[1]:  # each may take its share out of every batch
        return None
    is_whole = all(one.reads_all for one in samplers) and _is_as_long_as_alone(runs, first)
    is_certain = is_whole and not any(loop.may_end_early for loop in first)
    are_shares = all(one.num_replicas for one in samplers)
    is_same_data = are_shares or _has_same_data(runs.together)
    repeated = {*indices[0]} & {*indices[1]}
    if is_same_data and len(repeated) > _SOME * len(indices[0]):
        is_certain = is_certain or are_shares
        evidence = (
            f"of the first {len(indices[0])} samples of {ranks((0, 1))}, {len(repeated)} were drawn by both "
            f"(indices {listed(sorted(repeated))})"
        )
    elif is_whole and is_same_data is not False:
        evidence = (
            f"the loader of every rank draws all {first[0].num_samples} samples in an epoch, in an order of its own: "
            f"{len(first)} times {first[0].num_samples}"
        )
    else:
        return None
    if is_same_data and is_certain:
        seeds = [one.seed for one in samplers if one.num_replicas]
        change = f"give the DistributedSampler of every rank the same seed; received {listed(seeds)}"
        return _overlap(evidence, first[0].line, change if len(set(seeds)) > 1 else mend(local_ranks[0]))
    reason = "that is meant" if is_same_data else "ranks have data of their own"
    return f"{evidence}; right where {reason}, else: {mend(local_ranks[0])}"


def _by_lengths(runs: Runs, first: Sequence[Loop]) -> Finding | str | None:
    """Of Keras' fit, which knows how many batches an epoch has; and of streams."""
    run = runs.together
    epochs = zip(*(rank.training_loops for rank in run.ranks), strict=False)
    rows = [[rank.rows(loop) for rank, loop in zip(run.ranks, epoch, strict=True)] for epoch in epochs]
    num_common = max(map(_num_common, rows))
    is_whole = bool(num_common) or (_holds_the_same(run) and not any(loop.may_end_early for loop in first))
    common = f"{num_common} of the first {len(rows[0][0])} samples were those of another rank"
    if is_whole and first[0].sampler is None and _is_as_long_as_alone(runs, first):
        evidence = f"an epoch has {first[0].num_batches} batches on each of {len(first)} ranks, as on one, and {common}"
        return _overlap(evidence, first[0].line, mend(run.ranks[0]))
    return f"{common}; right where that is meant, else: {mend(run.ranks[0])}" if num_common else None


def _without_loops(run: Run) -> str | None:
    """Of a loop of one's own over tf.data, whose epochs are not seen."""
    first = [[one for one in rank.forwards(training=True) if one.step <= _FIRST_STEPS] for rank in run.ranks]
    rows = [[row for one in own for row in one.rows] for own in first]
    if not (num_common := _num_common(rows)):
        return None
    common = f"{num_common} of the first {len(rows[0])} samples were those of another rank"
    return f"{common}; right where that is meant, else: {mend(run.ranks[0])}"


def _overlap(evidence: str, line: str, change: str) -> Finding:
    return Finding(
        "samples-overlap",
        "ranks do not share the data set: samples are repeated on other ranks, and others missed, in every epoch",
        evidence,
        change,
        line,
    )


def _is_as_long_as_alone(runs: Runs, first: Sequence[Loop]) -> bool:
    """Whether all ranks have as many samples and batches an epoch as one rank that is alone."""
    loops = [*first, *(runs.alone.ranks[0].training_loops[:1] if runs.alone else ())]
    lengths = {(loop.num_samples, loop.num_batches) for loop in loops}
    return len(lengths) == 1 and first[0].num_batches is not None


def _holds_the_same(run: Run) -> bool | None:
    """Whether ranks 0 and 1 have the same samples at the places that were looked at; None where none were."""
    held = [rank.all(Held) for rank in run.ranks[:2]]
    return held[0][0] == held[1][0] if all(held) else None


def _has_same_data(run: Run) -> bool | None:
    """The same, also by the samples that they trained on, in whichever epoch."""
    rows = [[row for one in rank.forwards(training=True) for row in one.rows] for rank in run.ranks[:2]]
    return True if _num_common(rows) else _holds_the_same(run)


def _num_common(rows: Sequence[Sequence[str]]) -> int:
    """How many samples ranks 0 and 1 have both, if more than are alike on a rank alone."""
    num_alike = sum(count - 1 for count in Counter(rows[0]).values())
    num_common = len({*rows[0]} & {*rows[1]})
    return num_common if num_common > num_alike else 0
