"""Check that ranks share the data set: every sample once, on one rank, in a different order each epoch."""

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from allstep.commands.prove.checks import sharing
from allstep.commands.prove.checks.weights import rejoins
from allstep.commands.prove.findings import Finding, listed, ranks
from allstep.commands.prove.rank import MOST, Rank
from allstep.commands.prove.records import Forward, Loop, LoopEnd, Step, Yielded
from allstep.commands.prove.runs import Run, Runs


def check(runs: Runs) -> Iterator[Finding]:
    """Compare the samples of the ranks."""
    run = runs.together
    if run.num_ranks == 1:
        return
    undivided = _undivided(runs)  # then epochs repeat samples for that reason
    finding = same_samples(run)
    if isinstance(finding, Finding) or (not undivided and isinstance(finding := sharing.judge(runs), Finding)):
        yield finding
    if undivided:
        yield undivided
    if finding := _uneven(run):
        yield finding
    if finding := _same_order(run.ranks[0]):
        yield finding
    if finding := _doubled(run.ranks[0]):
        yield finding


def batches(forwards: Sequence[Forward]) -> dict[int, list[str]]:
    """Return the samples of each step."""
    found: dict[int, list[str]] = {}
    for forward in forwards:
        found.setdefault(forward.step, []).extend(forward.rows)
    return found


def is_same(first: Sequence[str], second: Sequence[str]) -> bool:
    """Return whether two batches have most samples of the shorter one in common."""
    return len({*first} & {*second}) > MOST * min(len({*first}), len({*second}))


def same_samples(run: Run) -> Finding | str | None:
    """Find samples that are the same on all ranks; a line on them, if each rank's loss may take a share of them."""
    if run.shares_work or run.num_ranks == 1:
        return None
    sites = _sites(run)
    same_sites = [site for site in sites if _alike(_steps_at(run, [site]))]
    # Ranks may give a model the same noise, or the same anchors, beside samples of their own.
    if not same_sites or (len(same_sites) < len(sites) and not any(_is_loaded(run, site) for site in same_sites)):
        return None
    steps = _steps_at(run, same_sites)
    if not (alike := _alike(steps)):
        return None
    first, second, same = alike
    batch, other = steps[first][same[0]], steps[second][same[0]]
    if len(same) > 1 and all({*steps[first][step]} == {*batch} for step in same) and _have_own_losses(run):
        return (
            f"every rank calls the model with the same {len({*batch})} samples in each step ({same_sites[0]}); right "
            "where its loss is that of a share of them, as of the nodes of a graph, else: give each rank its own share"
        )
    loops = run.ranks[0].training_loops
    return Finding(
        "same-samples",
        "ranks train on the same samples: more ranks do the same work, and no more",
        f"in {len(same)} of {len(steps[0])} steps, {ranks((first, second))} had the same samples "
        f"({len({*batch} & {*other})} of {len(batch)} in step {same[0]})",
        sharing.mend(run.ranks[0]),
        loops[0].line if loops else same_sites[0],
    )


def _have_own_losses(run: Run) -> bool:
    return all(len({step.loss for step in steps} - {None}) > 1 for steps in run.steps())


def _sites(run: Run) -> list[str]:
    """Return the lines in which all ranks call models in training with samples."""
    lines = [{one.line for one in rank.forwards(training=True) if one.rows} for rank in run.ranks]
    return sorted(set.intersection(*lines)) if lines else []


def _alike(steps: Sequence[Mapping[int, list[str]]]) -> tuple[int, int, list[int]] | None:
    """Return the first two ranks that have the same samples in most of their common steps, and these steps."""
    for first, second in itertools.combinations(range(len(steps)), 2):
        same = [step for step in steps[first] if is_same(steps[first][step], steps[second][step])]
        if 2 * len(same) > len(steps[first]):
            return first, second, same
    return None


def _is_loaded(run: Run, site: str) -> bool:
    """Return whether the samples in a line come from a loader as they are."""
    rank = run.ranks[0]
    return any(not rank.loaded.isdisjoint(one.rows) for one in rank.forwards(training=True) if one.line == site)


def _steps_at(run: Run, sites: Collection[str]) -> list[dict[int, list[str]]]:
    """Return the samples of each rank at some lines, in the steps that all ranks have."""
    steps = [_batches_at(rank, sites) for rank in run.ranks]
    common = sorted(set(steps[0]).intersection(*steps[1:]))
    return [{step: own[step] for step in common} for own in steps]


def _batches_at(rank: Rank, sites: Collection[str]) -> dict[int, list[str]]:
    """Return the samples of each step at some lines: the loaded ones, if a batch also has others, such as a GAN's."""
    found = batches([one for one in rank.forwards(training=True) if one.line in sites])
    return {step: [row for row in rows if row in rank.loaded] or rows for step, rows in found.items()}


def _uneven(run: Run) -> Finding | None:
    """Find a training loop that does not run equally far on all ranks.

    Lengths of loaders tell it where the script loops over all of them, and the ends of loops where ranks got stuck.
    Rounds after which ranks average their weights may differ.
    """
    is_stuck = bool(run.stacks) or run.is_deserted
    if run.joins or (rejoins(run, 1) and not is_stuck):
        return None
    for together in _loops_by_line(run):
        numbers = [loop.num_batches for loop in together]
        if any(loop.may_end_early for loop in together) or (is_stuck and None in numbers):
            numbers = [_length(rank, loop) for rank, loop in zip(run.ranks, together, strict=True)] if is_stuck else []
        is_uneven = None not in numbers and len(set(numbers)) > 1
        if is_uneven and any(map(_trains, run.ranks, together)):
            return Finding(
                "uneven-batches",
                "ranks have different numbers of batches: those with more wait for the others for ever",
                f"an epoch has {listed(numbers)} batches on {ranks(range(len(numbers)))}",
                "give all ranks the same number: DistributedSampler fills the last batch, drop_last=True; or "
                f"{joining(run)}",
                together[0].line,
            )
    return None


def joining(run: Run) -> str:
    return "hvd.join() after the loop" if "horovod" in run.library else "with Join([model]): around the loop"


def _loops_by_line(run: Run) -> Iterator[tuple[Loop, ...]]:
    """Yield the loops of all ranks in each line, in order; a rank may have others, such as validation on rank 0."""
    for line in dict.fromkeys(loop.line for loop in run.ranks[0].all(Loop)):
        yield from zip(*([loop for loop in rank.all(Loop) if loop.line == line] for rank in run.ranks), strict=False)


def _length(rank: Rank, loop: Loop) -> int | None:
    """Return how many batches a loop had until its loader ended, or has had so far; None if it was cut."""
    ends = [one for one in rank.all(LoopEnd) if one.loop == loop.number]
    if ends:
        return None if ends[0].is_cut else ends[0].num_batches
    return sum(one.loop == loop.number for one in rank.all(Yielded))


def _trains(rank: Rank, loop: Loop) -> bool:
    return any(forward.loop == loop.number for forward in rank.forwards(training=True))


def _same_order(rank: Rank) -> Finding | None:
    trained = _loops_trained_on(rank)
    loops = [loop for loop in rank.all(Loop) if loop.number in trained and loop.sampler and loop.sampler.shuffles]
    for begin in {loop.data: loop for loop in reversed(loops)}.values():
        # A loader that is not looped over by `for` may be started in one line, and again in another one.
        own = [one for one in loops if one.line == begin.line or (one.may_end_early and begin.may_end_early)]
        own = [one for one in own if one.data == begin.data][:2]
        first, *others = map(rank.indices, own)
        if others and first[: len(others[0])] == others[0][: len(first)] and first != sorted(first):
            return Finding(
                "same-order",
                "every epoch has the same order of samples: set_epoch was forgotten",
                f"both epochs begin with the indices {listed(first)}",
                "at the start of each epoch: sampler.set_epoch(epoch)",
                own[1].line,
            )
    return None


def _loops_trained_on(rank: Rank) -> set[int]:
    """Return the numbers of the loops in which any optimizer steps, or whose data are read before several steps."""
    before, counts = set[int](), Counter[int]()
    for record in rank.records:
        if isinstance(record, Yielded):
            before.add(record.loop)
        elif isinstance(record, Step):
            counts.update(before)
            before.clear()
    data = {loop.data for loop in rank.all(Loop) if loop.data and counts[loop.number] > 1}
    return {step.loop for step in rank.all(Step)} | {loop.number for loop in rank.all(Loop) if loop.data in data}


def _doubled(rank: Rank) -> Finding | None:
    """Find a stream that each worker process of a loader reads from its beginning."""
    for loop in rank.training_loops[:1]:
        batches = [batch.rows for batch in rank.all(Yielded) if batch.loop == loop.number]
        num_rounds = len(batches) // max(1, loop.num_workers)  # the workers' batches come in turn
        rows = [row for batch in batches[: num_rounds * loop.num_workers] for row in batch]
        if loop.num_samples is None and loop.num_workers > 1 and 2 * len({*rows}) <= len(rows) > 1:
            return Finding(
                "samples-doubled",
                f"each of a rank's {loop.num_workers} workers reads the whole stream: the rank trains on every sample "
                f"{loop.num_workers} times",
                f"of the first {len(rows)} samples of rank {rank.number}, {len({*rows})} differ",
                "in the data set's __iter__, share the samples by torch.utils.data.get_worker_info()",
                loop.line,
            )
    return None


def _undivided(runs: Runs) -> Finding | None:
    """Find a number of steps per epoch that the script gives to fit, and does not divide by the ranks."""
    together = [rank.training_loops[:1] for rank in runs.together.ranks]
    alone = runs.first_loop_alone
    if runs.together.library != "horovod.tensorflow" or not alone or not all(together):
        return None
    first, lengths = together[0][0], {loop.num_batches for [loop] in together} | {alone[0].num_batches}
    sizes = global_batches(runs)
    if not first.may_end_early or None in lengths or len(lengths) > 1 or sizes[1] < 1.5 * sizes[0] or not sizes[0]:
        return None
    return Finding(
        "epoch-not-divided",
        "epochs have as many steps on several ranks as on one, so that they train on more samples and end later",
        f"steps_per_epoch is {first.num_batches} on one rank and on {len(together)}, the global batch {sizes[0]} and "
        f"{sizes[1]} samples",
        "steps_per_epoch=steps // hvd.size()",
        first.line,
    )


def global_batches(runs: Runs) -> tuple[int, int]:
    """Return the samples in the first step of one rank, and of several, except in lines of some of these only.

    They are not known where ranks share the work on the same samples.
    """
    if runs.together.shares_work:
        return 0, 0
    lines = {one.line for rank in runs.together.ranks for one in rank.forwards(training=True)} - {
        *_sites(runs.together)
    }
    calls = [
        [one for rank in run.ranks for one in _first_calls(rank, lines)]
        for run in (runs.alone or runs.together, runs.together)
    ]
    alone, together = (sum(len(one.rows) for one in own) for own in calls)
    bytes_alone, bytes_together = (sum(one.num_bytes for one in own) for own in calls)
    if bytes_alone and bytes_together and not 2 / 3 < (growth := bytes_together / bytes_alone) * alone / together < 1.5:
        together = round(alone * growth)  # where rows are not samples, such as of sequences by time
    return alone, together


def _first_calls(rank: Rank, others: Collection[str]) -> list[Forward]:
    return [one for one in rank.forwards(training=True) if one.step == 1 and one.line not in others]
