"""Check that each rank reads its own share of the data set, rather than all of it in its own order."""

import itertools
from collections import Counter
from collections.abc import Sequence

from allstep.commands.prove.findings import Finding, listed, ranks
from allstep.commands.prove.rank import MOST, Rank
from allstep.commands.prove.records import Batch, Held, Loop, LoopEnd, Restored, Yielded
from allstep.commands.prove.runs import Run, Runs

_SOME = 0.05
"""Share of common indices above which two ranks overlap; a sampler may repeat fewer to fill its last batch."""
_FIRST_STEPS = 3
"""Steps compared in a loop whose epochs are unknown; more may span two epochs, which may have the same samples."""


def judge(runs: Runs) -> Finding | str | None:
    """Return what is wrong with how ranks share the data set, or a line on what may be, if the steps do not show it."""
    run = runs.together
    loops = [rank.training_loops for rank in run.ranks]
    if run.num_ranks == 1 or run.shares_work:
        return None
    if not all(loops):
        return _without_loops(run)
    first = [own[0] for own in loops]
    if any(rank.indices(loop) for rank, loop in zip(run.ranks, first, strict=True)):
        return _by_samplers(runs, first)
    return _by_lengths(runs, first)


def mend(rank: Rank) -> str:
    """Return the change that gives each rank its own share."""
    if rank.library == "tf.distribute":
        return (
            "loop over strategy.experimental_distribute_dataset(dataset), which gives each replica its share; in the "
            "function of distribute_datasets_from_function, "
            "dataset.shard(context.num_input_pipelines, context.input_pipeline_id)"
        )
    own = ("hvd.size()", "hvd.rank()") if "horovod" in rank.library else ("dist.get_world_size()", "dist.get_rank()")
    size, number = own
    loop = next(iter(rank.training_loops), None)
    if loop and loop.sampler:
        if loop.num_samples is None:
            return f"in the stream's __iter__, itertools.islice(samples, {number}, None, {size})"
        share = f"(data, num_replicas={size}, rank={number})"
        if loop.sampler.num_replicas:
            return f"{loop.sampler.kind}{share}, with this job's numbers"
        kind = "hvd.elastic.ElasticSampler(data)" if rank.all(Restored) else f"DistributedSampler{share}"
        return f"DataLoader(data, sampler={kind})"
    other = (
        "dataset.shard(size, rank)" if "tensorflow" in rank.library else "by seed + rank if samples are drawn at random"
    )
    return f"give each rank its own share: data[rank::size], or {other}"


def _by_samplers(runs: Runs, first: Sequence[Loop]) -> Finding | str | None:
    """Judge loaders of PyTorch, whose samplers show what they draw in an epoch."""
    ranks_of_run = runs.together.ranks
    samplers = [loop.sampler for loop in first if loop.sampler]
    # A loader may go on from epoch to epoch.
    num_shares = [getattr(loop.sampler, "num_replicas", 0) or 1 for loop in first]
    ends = [one.num_samples and -(-one.num_samples // num) for one, num in zip(first, num_shares, strict=True)]
    indices = [rank.indices(loop)[:end] for rank, loop, end in zip(ranks_of_run, first, ends, strict=True)]
    if finding := _by_contents(runs, first):
        return finding
    if indices[0] == indices[1]:
        if any(map(Rank.rows, ranks_of_run, first)):
            return _changed(runs, first)
        return (
            f"the loaders of {ranks((0, 1))} draw the same samples, and no call of a model shows what becomes of them "
            f"({first[0].line}); right where each rank takes its share of a batch, else: {mend(ranks_of_run[0])}"
        )
    # However the script divides batches, a loader that draws all samples does so in each epoch.
    is_whole = all(one.reads_all for one in samplers) and bool(
        _is_as_long_as_alone(runs, first, "num_samples") or _holds_the_same(runs.together)
    )
    is_certain = is_whole and not any(loop.may_end_early for loop in first)
    are_shares = all(one.num_replicas for one in samplers)
    is_same_data = are_shares or _has_same_data(runs.together)
    if _fill_last_batches(runs.together, first, indices):
        return None
    if not is_whole and not are_shares and (num_samples := first[0].num_samples):  # such a sampler may be endless
        indices = [own[: -(-num_samples // len(first))] for own in indices]
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
    elif are_shares and _holds_the_same(runs.together) is False:
        return (
            "the data sets that DistributedSamplers divide have other samples, or other labels, at equal places on "
            f"{ranks((0, 1))} ({first[0].line}); right where a generator of the script changes them, else: bring files "
            "and names of classes into one order: sorted(names)"
        )
    else:
        return None
    if is_same_data and is_certain:
        drawn = [(one.seed, one.epoch) for one in samplers if one.num_replicas]
        change = f"give the DistributedSampler of every rank the same seed and epoch; received {listed(drawn)}"
        shares = _shares_used(runs, first)
        if shares and max(shares[1:]) < 0.75 * shares[0]:  # each rank takes a part of every sample, as of its tokens
            change = "draw the same samples in the same order on all ranks, by one seed"
        elif len({*drawn}) < 2:
            change = mend(ranks_of_run[0])
        return _overlap(evidence, first[0].line, change)
    reason = "that is meant" if is_same_data else "ranks have data of their own"
    return f"{evidence}; right where {reason}, else: {mend(ranks_of_run[0])}"


def _fill_last_batches(run: Run, first: Sequence[Loop], indices: Sequence[Sequence[int]]) -> bool:
    """Return whether ranks draw each sample once, but for some that fill the last batches, as Accelerate does."""
    drawn, num_samples = Counter(itertools.chain(*indices)), first[0].num_samples
    if num_samples is None or len(drawn) != num_samples or max(map(len, indices)) >= num_samples:
        return False
    global_batch_size = sum(
        next((len(one.indices) for one in rank.all(Batch) if one.loop == loop.number), 0)
        for rank, loop in zip(run.ranks, first, strict=True)
    )
    return drawn.total() - num_samples < global_batch_size


def _changed(runs: Runs, first: Sequence[Loop]) -> Finding | str | None:
    """Find ranks that load the same samples, and change them by random numbers of their own, such as noise.

    No such fault are ranks with data of their own, and those that take a share out of every batch, or of every
    sequence: on one rank, each loaded sample then gives more to the model.
    """
    if not runs.alone:
        return None
    together = runs.together.ranks
    loaded = [
        {row for one in rank.all(Yielded) if one.loop == loop.number for row in one.rows}
        for rank, loop in zip(together, first, strict=True)
    ]
    is_same = _holds_the_same(runs.together)
    if is_same is None:
        is_same = len(loaded[0] & loaded[1]) > MOST * len(loaded[0])
    shares = _shares_used(runs, first)
    if not is_same or not shares or max(shares) > 1.05 * min(shares):
        return None
    evidence = f"the loaders of {ranks((0, 1))} draw the same indices, such as {listed(together[0].indices(first[0]))}"
    if not all(one.sampler and (one.sampler.reads_all or one.sampler.num_replicas) for one in first):
        return f"{evidence} ({first[0].line}); right where that is meant, else: {mend(together[0])}"
    return Finding(
        "same-samples",
        "ranks train on the same samples, which each rank changes by random numbers of its own",
        evidence,
        mend(together[0]),
        first[0].line,
    )


def _shares_used(runs: Runs, first: Sequence[Loop]) -> list[float]:
    """Return what models use of each loaded sample on one rank, and on each of several; empty if that is unknown."""
    own = [_used(runs.alone.ranks[0], loop) for loop in runs.first_loop_alone] if runs.alone else []
    return [*own, *map(_used, runs.together.ranks, first)] if own and own[0] else []


def _used(rank: Rank, loop: Loop) -> float:
    """Return how many bytes a model has got in a loop for each sample that was loaded, up to the last call."""
    calls = [index for index in rank.training_calls if vars(rank.records[index])["loop"] == loop.number]
    before = rank.records[: max(calls, default=0)]
    num_loaded = sum(len(one.rows) for one in before if isinstance(one, Yielded) and one.loop == loop.number)
    given = (one for one in rank.forwards(training=True) if one.loop == loop.number)
    return sum(one.num_bytes or len(one.rows) for one in given) / num_loaded if num_loaded else 0.0


def _by_lengths(runs: Runs, first: Sequence[Loop]) -> Finding | str | None:
    """Judge Keras' fit, which knows how many batches an epoch has, and streams."""
    run = runs.together
    epochs = zip(*(rank.training_loops for rank in run.ranks), strict=False)
    rows = [[rank.rows(loop) for rank, loop in zip(run.ranks, epoch, strict=True)] for epoch in epochs]
    num_common = max(map(_num_common, rows))
    is_whole = bool(num_common) or (_holds_the_same(run) and not any(loop.may_end_early for loop in first))
    common = f"{num_common} of the first {len(rows[0][0])} samples were those of another rank"
    draws_once = len({*rows[0][0]}) > (1 - _SOME) * len(rows[0][0])
    # A stream that is as long as on one rank may be drawn with replacement.
    whole = [row for loop in runs.first_loop_alone for row in runs.alone.ranks[0].rows(loop)] if runs.alone else []
    is_share = first[0].sampler is None or len(rows[0][0]) < (1 - _SOME) * len(whole)
    evidence = ""
    if is_whole and first[0].sampler is None and _is_as_long_as_alone(runs, first, "num_batches"):
        evidence = f"an epoch has {first[0].num_batches} batches on each of {len(first)} ranks, as on one, and {common}"
    elif num_common > _SOME * len(rows[0][0]) and draws_once and is_share and _is_seen_to_its_end(run, first):
        evidence = f"of the samples of an epoch, {num_common} were on two ranks"
    # As Horovod's first Keras example has it, ranks may read all samples in their share of the epochs.
    if evidence and all(first[0].num_epochs >= one.num_epochs for one in runs.first_loop_alone):
        return _overlap(evidence, first[0].line, mend(run.ranks[0]))
    evidence = evidence or (common if num_common else "")
    return f"{evidence}; right where that is meant, else: {mend(run.ranks[0])}" if evidence else None


def _is_seen_to_its_end(run: Run, first: Sequence[Loop]) -> bool:
    """Return whether all ranks have read their first epoch to the end of a stream, or of fit's data."""
    ends = [
        [one for one in rank.all(LoopEnd) if one.loop == loop.number and not one.is_cut]
        for rank, loop in zip(run.ranks, first, strict=True)
    ]
    return all(ends) and not any(loop.may_end_early for loop in first)


def _by_contents(runs: Runs, first: Sequence[Loop]) -> Finding | None:
    """Judge ranks that have data sets of their own, by the samples in these."""
    held = [rank.all(Held)[0] for rank in runs.together.ranks if rank.all(Held)]
    if len(held) < len(first) or _holds_the_same(runs.together) is not False:
        return None
    counts = Counter(digest for one in held for digest in {*one.digests})
    num_alike = sum(len(one.digests) - len({*one.digests}) for one in held)
    common = [digest for digest, count in counts.items() if count > 1]
    if len(common) > max(1, num_alike, _SOME * min(len(one.digests) for one in held)):
        evidence = f"of {sum(len(one.digests) for one in held)} inspected samples, {len(common)} are on several ranks"
        change = "give each rank its own share of one list in one order: sorted(files), shuffled by one seed"
        return _overlap(evidence, first[0].line, change)
    numbers = [loop.num_samples or 0 for loop in first]
    alone = runs.first_loop_alone
    if not all(numbers) or not alone or sum(numbers) >= (1 - _SOME) * (alone[0].num_samples or 0):
        return None
    return Finding(
        "samples-left-out",
        "the shares of the ranks do not make up the data set: some samples are never trained on",
        f"the ranks have {listed(numbers)} samples, one rank has {alone[0].num_samples}",
        "give each rank its own share, and all samples to some rank: data[rank::size]",
        first[0].line,
    )


def _without_loops(run: Run) -> str | None:
    """Judge a custom loop over tf.data, whose epochs cannot be observed."""
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


def _is_as_long_as_alone(runs: Runs, first: Sequence[Loop], field: str) -> bool:
    """Return whether each of several ranks has as many samples, or batches, per epoch as a single rank."""
    lengths = {getattr(loop, field) for loop in (*first, *runs.first_loop_alone)}
    return len(lengths) == 1 and None not in lengths


def _holds_the_same(run: Run) -> bool | None:
    """Return whether ranks 0 and 1 have the same samples at the inspected positions; None if none were inspected."""
    held = [rank.all(Held) for rank in run.ranks[:2]]
    if not all(held):
        return None
    pairs = list(zip(held[0][0].digests, held[1][0].digests, strict=False))
    return 2 * sum(one == other for one, other in pairs) > len(pairs)


def _has_same_data(run: Run) -> bool | None:
    """Return True if ranks 0 and 1 have trained on common samples in any epoch, else `_holds_the_same`."""
    rows = [[row for one in rank.forwards(training=True) for row in one.rows] for rank in run.ranks[:2]]
    return True if _num_common(rows) else _holds_the_same(run)


def _num_common(rows: Sequence[Sequence[str]]) -> int:
    """Return how many samples ranks 0 and 1 have in common; 0 unless these are more than the duplicates on rank 0."""
    num_alike = sum(count - 1 for count in Counter(rows[0]).values())
    num_common = len({*rows[0]} & {*rows[1]})
    return num_common if num_common > num_alike else 0
