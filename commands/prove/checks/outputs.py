"""Is each validation sample counted once, over all ranks, and each file written by one rank?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from allstep.commands.prove.checks.samples import overlap
from allstep.commands.prove.findings import Finding, ranks
from allstep.commands.prove.records import Collective, Forward, Step, Write
from allstep.commands.prove.runs import Rank, Run, Runs
from allstep.common.exact.replica_check import DROP_IN_CHECK

_MOST = 0.5


def check(runs: Runs) -> Iterator[Finding]:
    """Compare what ranks validate, and what they write."""
    run = runs.together
    if run.num_ranks == 1:
        return
    if finding := _validation(run):
        yield finding
    writers: dict[str, dict[int, Write]] = defaultdict(dict)
    for rank in run.ranks:
        for write in rank.all(Write):
            writers[write.path][rank.number] = write
    for path, by_rank in writers.items():
        if len(by_rank) > 1:
            yield Finding(
                "every-rank-writes",
                "several ranks write the same file, each over the other",
                f"{ranks(list(by_rank))} opened {path} to write",
                "if rank == 0: around what writes",
                next(iter(by_rank.values())).line,
            )


def _validation(run: Run) -> Finding | None:
    first = [next(iter(_evaluated(rank)), None) for rank in run.ranks]
    # One rank validates for all, or none does; or the script brings results together by the strategy that it runs in.
    if None in first or run.library == "tf.distribute":
        return None
    [one, other, *_] = [forward for forward in first if forward]
    reduced = [_is_reduced(rank) for rank in run.ranks]
    if None in reduced:
        return None
    is_reduced = all(reduced)
    is_same = overlap(one.rows, other.rows) > _MOST
    if is_same and is_reduced:
        return Finding(
            "validation-repeated",
            "every rank validates the same samples, and their results are then reduced: samples count several times",
            f"{ranks((0, 1))} evaluated the same {len({*one.rows} & {*other.rows})} samples in their first batches",
            "give each rank its share of the validation set: sampler=DistributedSampler(validation, shuffle=False)",
            one.line,
        )
    if not is_same and not is_reduced and one.rows and other.rows:
        return Finding(
            "validation-of-one-rank",
            "each rank validates a share of the samples, and nobody brings the results together: what is reported is "
            "one rank's",
            f"no collective follows the evaluation of {ranks((0, 1))}, whose samples differ",
            "average the sums over the ranks: hvd.allreduce(correct), dist.all_reduce(correct)",
            one.line,
        )
    return None


def _evaluated(rank: Rank) -> list[Forward]:
    """The calls of its models in evaluation; before the first step, models are called to make their weights."""
    return [forward for forward in rank.forwards(training=False) if forward.step > 1]


def _is_reduced(rank: Rank) -> bool | None:
    """Whether a collective of the script's own follows the first evaluation, before training goes on.

    None where the rank has come to neither: it failed, or waits.
    """
    has_evaluated = False
    for record in rank.records:
        if isinstance(record, Forward) and not record.is_training and record.step > 1:
            has_evaluated = True
        elif isinstance(record, Collective) and (record.kind == "barrier" or record.name == DROP_IN_CHECK):
            continue
        elif has_evaluated and isinstance(record, Collective):
            return True
        elif has_evaluated and isinstance(record, (Step, Forward)) and getattr(record, "is_training", True):
            return False
    return False if rank.ended and not rank.error else None
