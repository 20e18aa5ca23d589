"""Check that each validation sample is counted once over all ranks, and each file is written by one rank."""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from allstep.commands.prove.checks.carrying import carries, discards
from allstep.commands.prove.checks.samples import is_same
from allstep.commands.prove.findings import Finding, listed, ranks
from allstep.commands.prove.rank import Rank
from allstep.commands.prove.records import Collective, Forward, Loop, Read, Step, Write
from allstep.commands.prove.runs import Run, Runs
from allstep.common.exact.replica_check import DROP_IN_CHECK

_REDUCTIONS = ("reduce", "gather", "all_to_all")
_OTHER_WAYS = re.compile(r"\bmpi4py\b|\b(?:TCP|File|Hash|Prefix)Store\b|_default_store\b")
"""Libraries that are not observed and may reduce results: mpi4py, and the stores of torch.distributed."""
"""Parts of the names of collectives that can bring results together."""


def check(runs: Runs) -> Iterator[Finding]:
    """Compare what ranks validate and what they write."""
    run = runs.together
    if run.num_ranks == 1:
        return
    if finding := _validation(runs):
        yield finding
    yield from _writes(run)


def _writes(run: Run) -> Iterator[Finding]:
    """Find files that several ranks write, with one finding for all files of a line."""
    writers: dict[str, dict[int, Write]] = defaultdict(dict)
    for rank in run.ranks:
        for write in rank.all(Write):
            if "__pycache__" not in Path(write.path).parts:  # Python writes bytecode by names of its own
                writers[write.path][rank.number] = write
    paths: dict[str, list[str]] = defaultdict(list)
    for path, by_rank in writers.items():
        if len(by_rank) > 1:
            paths[next(iter(by_rank.values())).line].append(path)
    for line, written in paths.items():
        numbers = sorted({number for path in written for number in writers[path]})
        yield Finding(
            "every-rank-writes",
            "several ranks write the same file, each over the other",
            f"{ranks(numbers)} opened {listed(written)} to write",
            "if rank == 0: around what writes, or around the callback that does",
            line,
        )


def _validation(runs: Runs) -> Finding | None:
    run = runs.together
    first = [next(iter(_evaluated(rank)), None) for rank in run.ranks]
    if finding := _of_a_share(runs):
        return finding
    # One rank validates for all, or none does; or what is not observed may reduce the results.
    text = runs.script.read_text() if runs.script else ""
    if None in first or run.library == "tf.distribute" or _OTHER_WAYS.search(text):
        return None
    [one, other, *_] = [forward for forward in first if forward]
    reduced = [_is_reduced(rank, runs) for rank in run.ranks]
    if None in reduced:
        return None
    is_reduced, is_keras = all(reduced), run.library == "horovod.tensorflow"
    reduction = "hvd.allreduce" if "horovod" in run.library else "dist.all_reduce"
    are_same = is_same(one.rows, other.rows)
    if are_same and one.weights != other.weights:  # of models of their own
        return None
    if are_same and is_reduced:
        return Finding(
            "validation-repeated",
            "every rank validates the same samples, and their results are then reduced: samples count several times",
            f"{ranks((0, 1))} evaluated the same {len({*one.rows} & {*other.rows})} samples in their first batches",
            "give each rank its share of the validation set: "
            + ("data[rank::size]" if is_keras else "sampler=DistributedSampler(validation, shuffle=False)"),
            one.line,
        )
    if not are_same and not is_reduced and one.rows and other.rows:
        return Finding(
            "validation-of-one-rank",
            "each rank validates a share of the samples, and the results are not reduced: what is reported is "
            "one rank's",
            f"no reduction carries the results of {ranks((0, 1))}, whose samples differ",
            "average the sums over the ranks: "
            + ("hvd.callbacks.MetricAverageCallback()" if one.evaluates else f"{reduction}(correct)"),
            one.line,
        )
    return None


def _of_a_share(runs: Runs) -> Finding | None:
    """Find one rank that validates for all, and reads only its share of the samples."""
    run = runs.together
    calls = [(rank, call) for rank in run.ranks for call in _evaluated(rank)[:1]]
    loops = [loop for rank, call in calls for loop in rank.all(Loop) if loop.number == call.loop]
    is_broken = run.failure or run.stacks or run.is_deserted  # the others were to validate as well
    if is_broken or len(loops) != 1 or (getattr(loops[0].sampler, "num_replicas", 0) or 1) < run.num_ranks:
        return None
    return Finding(
        "validation-of-one-rank",
        "one rank validates for all, and only its share of the samples",
        f"the sampler of its loader draws one of {run.num_ranks} shares",
        "leave the sampler out where one rank validates for all: DataLoader(validation)",
        loops[0].line,
    )


def _evaluated(rank: Rank) -> list[Forward]:
    """Return the calls of models in evaluation; calls before the first step only create weights and are left out."""
    return [forward for forward in rank.forwards(training=False) if forward.step > 1]


def _is_reduced(rank: Rank, runs: Runs) -> bool | None:
    """Return whether a reduction between the first validation and further training carries what was computed.

    The result is None if the rank has got to neither, because it failed or waits, if the model keeps its results, or if
    the rank sends them or writes a file of its own, which rank 0 may read.
    """
    of_first = {one.path for one in runs.together.ranks[0].all(Write)}
    validating, training = {*rank.validation_calls}, {*rank.training_calls}
    call: Forward | None = None
    for index, record in enumerate(rank.records):
        if index in validating and isinstance(record, Forward) and record.step > 1:
            call = call or record
            if not call.evaluates and discards(runs.script, call.callers):
                return None
        elif call is None:
            continue
        elif isinstance(record, Collective):
            is_check = record.name.startswith(DROP_IN_CHECK)
            is_reduction = any(word in record.kind for word in _REDUCTIONS) and not is_check
            is_sent = rank.number > 0 and "send" in record.kind
            if (is_reduction or is_sent) and carries(runs.script, call.callers, record.callers):
                return True if is_reduction else None
        elif isinstance(record, Write):
            is_sent = rank.number > 0 and record.path not in of_first and not _is_left(runs.together, record)
            if is_sent and carries(runs.script, call.callers, record.callers):
                return None
        elif isinstance(record, Step) or index in training:
            return False
    return False if rank.ended and not rank.error and not runs.together.failure else None


def _is_left(run: Run, write: Write) -> bool:
    """Return whether rank 0 reads its own file of those that ranks write in a line, and none of the others is read."""
    first, *others = run.ranks
    own = {one.path for one in first.all(Write) if one.line == write.line}
    written = {one.path for rank in others for one in rank.all(Write)}
    read = [{one.path for one in rank.all(Read)} for rank in run.ranks]
    return not own.isdisjoint(read[0]) and written.isdisjoint(set.union(*read))
