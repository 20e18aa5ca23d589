"""Check that ranks draw different random numbers where they should, and share one set of running statistics."""

import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence

from allstep.commands.prove.checks.samples import is_same
from allstep.commands.prove.checks.weights import BROADCASTS, differing, has_shards, rejoins
from allstep.commands.prove.findings import Finding, listed, ranks
from allstep.commands.prove.rank import Rank
from allstep.commands.prove.records import AVERAGES_WEIGHTS, FROZEN, RUNNING, Forward, Kept, Yielded
from allstep.commands.prove.runs import Run, Runs

_BY_HAND = "for value in model.state_dict().values(): dist.broadcast(value, src=0)"


def check(runs: Runs) -> Iterator[Finding]:
    """Compare random states in training, and running statistics in evaluation."""
    run = runs.together
    if run.num_ranks == 1:
        return
    if (same := _same_draws(run)) and not same[0].by_library and not run.shares_work:
        forward, evidence = same
        yield Finding(
            "dropout-same",
            "ranks draw the same random numbers in the model: dropout leaves out the same units on all of them",
            evidence,
            _script_randomness(run.library),
            forward.line,
        )
    apart = _buffers_apart(run, are_constant=True)
    for line, names in apart.items():
        yield Finding(
            "buffers-differ",
            "ranks have different values in their models that no optimizer trains: constants, or averages of weights",
            f"in the steps seen, {listed(names)} have other values on other ranks",
            f"change them on all ranks alike; {BROADCASTS.get(run.library, _BY_HAND)}",
            line,
        )
    for together in zip(*(rank.forwards(training=False) for rank in run.ranks), strict=False):
        own = [{name: one for name, one in call.buffers.items() if name.endswith(RUNNING)} for call in together]
        if (names := differing(own)) and together[0].line not in apart:
            yield Finding(
                "batch-norm-parts",
                "each rank has running statistics of its own samples: their validation is of different models, and the "
                "checkpoint has one rank's",
                f"in evaluation before step {together[0].step}, {listed(names)} have other values on other ranks",
                "average them over the ranks before validation, or use SyncBatchNorm"
                + "; or leave broadcast_buffers of DistributedDataParallel on" * run.keeps_buffers,
                together[0].line,
            )
            break


def may_be_wrong(runs: Runs, found: Collection[str]) -> Iterator[str]:
    """Yield what is the same on all ranks, or differs, where a library or the script may mean it, by no finding yet."""
    run = runs.together
    if run.num_ranks == 1:
        return
    if (same := _same_draws(run)) and same[0].by_library:
        yield f"{same[1]} ({same[0].line}); right where a library seeds all ranks alike, else: torch.manual_seed(rank)"
    explained = {"batch-norm-parts", "buffers-differ", "weights-differ", "gradients-not-averaged"} & {*found}
    for line, names in () if explained else _buffers_apart(run, are_constant=False).items():
        yield (
            f"in training, {listed(names)} have other values on other ranks ({line}); right where each rank is to have "
            "its own, or rank 0's, which DDP sends, are enough, else: gather or average them, or use SyncBatchNorm"
        )
    kept = [list(together) for together in zip(*(rank.all(Kept) for rank in run.ranks), strict=False)]
    for name in () if {"weights-differ", "weights-part"} & {*found} else _kept(kept, "averages", are_equal=False):
        yield (
            f"the script averages {name} over steps, and ranks have other values of it; right where each rank is to "
            "have its own, else: average over the ranks what is added, as of the centre of a teacher's outputs"
        )
    for name in _kept(kept, "generators", are_equal=True):
        yield (
            f"ranks draw the same random numbers from {name} in each step; right where ranks are to choose alike, or "
            "each takes its share of what is drawn, else: seed it with seed + rank"
        )
    states = [_states_of_batches(rank) for rank in run.ranks[:2]]
    if not same and any(
        one and one == other for own in zip(*states, strict=False) for one, other in zip(*own, strict=False)
    ):
        line = run.ranks[0].training_loops[0].line
        yield (
            f"ranks 0 and 1 draw the same random numbers for their batches ({line}), so that augmentation or noise "
            "changes the samples of both alike; right where that is meant, else: seed each rank's generators with "
            "seed + rank"
        )


def _kept(together: Sequence[Sequence[Kept]], field: str, *, are_equal: bool) -> Iterator[str]:
    """Yield the variables that change in each step, and are always equal on all ranks, or never."""
    looks = [[getattr(one, field) for one in own] for own in together]
    for name in looks[0][0] if len(looks) > 2 else ():
        digests = [[one.get(name) for one in own] for own in looks]
        changes = all(before[0] != after[0] for before, after in itertools.pairwise(digests))
        if changes and all(None not in own and (len({*own}) == 1) == are_equal for own in digests):
            yield name


def _same_draws(run: Run) -> tuple[Forward, str] | None:
    """Return the first call in training in which ranks draw the same random numbers, and the evidence."""
    for together in zip(*(rank.forwards(training=True) for rank in run.ranks), strict=False):
        states = [forward.random_state for forward in together]
        if states[0] is not None and len(set(states)) < len(states):
            same = [number for number, state in enumerate(states) if states.count(state) > 1]
            evidence = f"in step {together[0].step}, {ranks(same)} had the same random state, of which the model drew"
            return together[0], evidence
    return None


def _buffers_apart(run: Run, *, are_constant: bool) -> dict[str, list[str]]:
    """Return the buffers that differ between ranks in training, by the line of a model's call.

    They are frozen weights, and those that no call changes and ranks are to have alike, if `are_constant`; else the
    others.
    """
    found: dict[str, list[str]] = {}
    begin = 2 if run.library == "horovod.tensorflow" else 1  # Keras' callbacks broadcast after the first step
    calls = [[one for one in rank.forwards(training=True) if one.buffers and one.step >= begin] for rank in run.ranks]
    validated = [
        name for one in run.ranks[0].forwards(training=False) for name in one.buffers if name.endswith(RUNNING)
    ]
    for line in dict.fromkeys(one.line for one in calls[0]):
        own = [[one.buffers for one in calls_of_rank if one.line == line] for calls_of_rank in calls]
        for name in [one for one in own[0][0] if one not in validated] if all(own) else ():
            digests = [[one.get(name) for one in buffers] for buffers in own]
            differ = [len({*one}) > 1 for one in zip(*digests, strict=False)]
            is_kept = name.startswith(FROZEN)
            is_constant = is_kept or (all(len(one) > 1 == len({*one}) for one in digests) and not run.keeps_buffers)
            # Others may begin alike, such as a centre of zeros.
            since = differ if is_kept else [*itertools.dropwhile(operator.not_, differ)]
            if is_constant == are_constant and len(since) > 1 and (since[-1] if is_kept else all(since)):
                found.setdefault(line, []).append(name)
    if (apart := _models_apart(run)) and apart[1] == are_constant:
        found.setdefault(apart[0], []).append("all weights")
    return found


def _models_apart(run: Run) -> tuple[str, bool] | None:
    """Return the line of a call of a model that is not trained there and differs between ranks, and whether it may not.

    It may not if ranks validate shares of the samples, or if some never change weights. It may if each evaluates some
    checkpoints, or has a model of its own in all steps, such as an opponent, which may also be a target that begins so.
    Ranks may try out models at times, such as mutations of a policy, which is not reported.
    """
    optimizers = range(1, run.num_optimizers + 1)
    if run.shares_work or run.has(AVERAGES_WEIGHTS) or any(rejoins(run, i) or has_shards(run, i) for i in optimizers):
        return None
    validated = {id(one) for rank in run.ranks for one in rank.forwards(training=False)}
    looks = [_looks(rank) for rank in run.ranks]
    found = None
    for key in looks[0]:
        steps = sorted(set(looks[0][key]).intersection(*(own.get(key, ()) for own in looks)))
        calls = [[own[key][step] for step in steps] for own in looks if steps]
        apart = [together for together in zip(*calls, strict=True) if len({one.weights for one in together}) > 1]
        if not apart:
            continue
        rows, is_validated = [one.rows for one in apart[0]], id(apart[0][0]) in validated
        is_kept = len(steps) > 1 and min(len({one.weights for one in own}) for own in calls) == 1
        if is_kept or (is_validated and all(rows) and not is_same(*rows[:2])):
            return key[0], True
        found = found or ((key[0], False) if is_validated or len(apart) == len(steps) > 1 else None)
    return found


def _looks(rank: Rank) -> dict[tuple[str, int], dict[int, Forward]]:
    """Return the calls with digests of weights, by their line and order in a step, and by step."""
    found: dict[tuple[str, int], dict[int, Forward]] = defaultdict(dict)
    counts = Counter[tuple[str, int]]()
    for one in rank.all(Forward):
        if one.weights:
            counts[one.line, one.step] += 1
            found[one.line, counts[one.line, one.step]][one.step] = one
    return found


def _states_of_batches(rank: Rank) -> list[tuple[str, ...]]:
    """Return the random states at the batches of the first training loop, but the first, which seeds the order."""
    first = next((loop.number for loop in rank.training_loops), None)
    return [one.random_states for one in rank.all(Yielded) if one.loop == first][1:]


def _script_randomness(library: str) -> str:
    if library == "horovod.tensorflow":
        return (
            "keras.utils.set_random_seed(seed + rank) before the model is made; and broadcast model.weights, for among "
            "model.variables are random states"
        )
    return "after the model is made: torch.manual_seed(seed + rank)"
