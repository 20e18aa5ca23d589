"""Check that all ranks apply the same gradients; `factors` tells whether these are the mean of what was computed."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from allstep.commands.prove.checks.carrying import compares_ranks
from allstep.commands.prove.checks.factors import (
    NEAR,
    SAME,
    beside_one_rank,
    equal,
    factor_of,
    wrong_factor,
)
from allstep.commands.prove.checks.samples import same_samples
from allstep.commands.prove.checks.weights import differing, has_shards, rejoins
from allstep.commands.prove.findings import Finding, listed, ranks
from allstep.commands.prove.rank import Rank, reductions
from allstep.commands.prove.records import (
    ADASUM,
    APPLIED,
    AVERAGES_WEIGHTS,
    BACKWARD,
    TENSOR_PARALLEL,
    Collective,
    EarlyChange,
    Forward,
    Sent,
    Step,
    Wrapped,
)
from allstep.commands.prove.runs import Run, Runs

_WAIT = "optimizer.synchronize() before that, and after it: with optimizer.skip_synchronize(): optimizer.step()"


def check(runs: Runs) -> Iterator[Finding]:
    """Compare gradients before and after the reduction."""
    run = runs.together
    if early := next(((rank, one) for rank in run.ranks for one in rank.all(EarlyChange)), None):
        yield _too_early(*early)
        return
    if run.has(ADASUM) or run.has(AVERAGES_WEIGHTS):
        return
    if finding := _changed_early(run) or (_different_samples(run, next(run.steps())[0]) if run.splits_layers else None):
        yield finding
        return
    found: list[tuple[tuple[Step, ...], list[str]]] = []
    for optimizer in range(1, run.num_optimizers + 1):
        if has_shards(run, optimizer):
            yield from _shares_not_averaged(run, optimizer)
            continue
        if apart := unequal(run.steps(optimizer)):
            first = apart[0][0]
            is_inner = first.bypass == "inner" and not rejoins(run, optimizer)  # a wrapper's average is left out
            if is_inner or not (_averages_weights(run, optimizer, apart[1]) or _reduces_in_step(run.ranks[0], first)):
                found.append(apart)
        elif run.num_ranks > 1:
            yield from wrong_factor(runs, optimizer)
    # Steps of a rank's own, as of DiLoCo, are right if an outer optimizer averages what the script gives it.
    outer = [apart for apart in found if not any(one.local for one in apart[0][0].gradients)]
    yield from (_not_averaged(run, *apart) for apart in outer or found)


def may_compare_less(runs: Runs) -> Iterator[str]:
    """Yield a line if losses compare samples of all ranks, and give another gradient than on one rank."""
    pairs = beside_one_rank(runs, 1)
    draws = any(one.random_state for one in runs.together.ranks[0].forwards(training=True)[:1])
    if pairs and factor_of(pairs) is None and not draws and compares_ranks(runs):
        yield (
            "a loss compares samples of all ranks, and its first gradient is no multiple of that of one rank with the "
            "same weights and samples; right where batch norm, or a queue, depends on the rank's own, else: gather by "
            "torch.distributed.nn.all_gather, and number labels from rank * len(batch)"
        )


def _too_early(rank: Rank, change: EarlyChange) -> Finding:
    which, mend = "clipped-before-average", f"{_WAIT}, or scaler.step(optimizer)"
    if change.what == APPLIED:
        step = next((one for one in rank.all(Step) if (one.number, one.line) == (change.step, change.line)), None)
        which, mend = "gradients-not-averaged", _averaging(rank, step) if step and not step.is_wrapped else _WAIT
    return Finding(
        which,
        f"gradients are {change.what} while Horovod still averages them: what is applied depends on timing",
        f"in step {change.step}, averages that backward had begun were on their way when gradients were {change.what}",
        mend,
        change.line,
    )


def _changed_early(run: Run) -> Finding | None:
    """Find gradients that each rank changes on its own before they are averaged, in a hook or in its loop.

    A change that is the same linear one on all ranks makes the differences between the ranks' gradients proportional.
    """
    for together in zip(*(rank.all(Sent) for rank in run.ranks), strict=False):
        first, *others = together
        for other in others:
            if first.name != other.name or not (first.local and first.sent and other.local and other.sent):
                continue
            before, after = np.subtract(first.local, other.local), np.subtract(first.sent, other.sent)
            size = float(before @ before)
            slope = float(after @ before) / size if size else 0.0
            rest = after - slope * before
            scale = max(np.abs(first.sent).max(), np.abs(other.sent).max(), abs(slope) * np.abs(first.local).max())
            if np.linalg.norm(rest) > max(NEAR * np.linalg.norm(after), 10 * SAME * scale):
                return Finding(
                    "clipped-before-average",
                    "each rank changes its own gradients before they are averaged, which is not what one rank with "
                    "the whole batch does",
                    f"the gradient of {first.name} that ranks send is not a multiple of the one from backward",
                    "average first, and then clip or change gradients",
                    first.line,
                )
    return None


def _averages_weights(run: Run, optimizer: int, names: Sequence[str]) -> bool:
    """Return whether ranks apply different gradients of these names, but have the same weights before later steps.

    Not so if each weight is that of the one rank which sends it, and nothing has reduced its gradient to that rank.
    """
    pairs = list(run.steps(optimizer))
    weights = [[step.weights for step in steps] for steps in pairs[1:]]
    has_weights = len(pairs) > 2 and all(all(own) for own in weights)
    is_alike = has_weights and not any(map(differing, weights)) and not _only_broadcasts(run.ranks[0], optimizer, names)
    return rejoins(run, optimizer) or is_alike


def _only_broadcasts(rank: Rank, optimizer: int, names: Sequence[str]) -> bool:
    """Return whether a rank's collectives up to the second step are broadcasts, beside those of other gradients."""
    backward = (index for index, one in enumerate(rank.records) if getattr(one, "what", "") == BACKWARD)
    window = rank.records[next(backward, 0) : rank.records.index(rank.steps(optimizer)[1])]
    sent = {one.name for one in window if isinstance(one, Sent)}
    kinds = {
        one.kind
        for before, one in itertools.pairwise(window)
        if isinstance(one, Collective) and not isinstance(before, Sent)
        if math.prod(one.shape) > 1 or "grouped" in one.kind
    }
    return kinds == {"broadcast"} and sent.isdisjoint(names)


def _reduces_in_step(rank: Rank, step: Step) -> bool:
    """Return whether an optimizer reduces tensors in its own step, as a ZeRO written by hand; then weights tell."""
    since = next(calls for own, calls in reductions(rank) if own is step)
    return any(step.line in one.callers[1:] for one in since if math.prod(one.shape) > 1)


def _shares_not_averaged(run: Run, optimizer: int) -> Iterator[Finding]:
    """Find weights of a rank's share, as of a ZeRO by hand, whose gradients are of that rank's own samples alone."""
    first = next(run.steps(optimizer), ())
    before = [
        one for rank, step in zip(run.ranks, first, strict=False) for one in rank.records[: rank.records.index(step)]
    ]
    calls = {one.kind for one in before if isinstance(one, Collective) and math.prod(one.shape) > 1}
    pairs = [
        [(np.array(g.applied), np.array(g.local)) for g in one.gradients if g.applied and g.local] for one in first
    ]
    if (
        not first
        or run.shares_work
        or any(part in kind for kind in calls for part in ("reduce", "gather", "all_to_all"))
        or None in [factor_of(own) for own in pairs]
        or isinstance(same_samples(run), Finding)
    ):
        return
    yield Finding(
        "gradients-not-averaged",
        "each rank steps a share of the weights by its own gradients: nothing averages them",
        f"in step 1, {listed([one.name for one in first[0].gradients])} get what rank 0 alone has computed",
        "reduce each gradient to the rank that steps its weight: dist.reduce(weight.grad, rank), divided by the ranks",
        first[0].line,
    )


def unequal(together: Iterable[tuple[Step, ...]]) -> tuple[tuple[Step, ...], list[str]] | None:
    """Return the first of some steps whose applied gradients differ between ranks, and the names of these gradients."""
    for steps in together:
        applied = [{one.name: one.applied for one in step.gradients} for step in steps]
        names = [name for name in applied[0] if not equal([one.get(name) for one in applied])]
        if names:
            return steps, names
    return None


def _not_averaged(run: Run, steps: tuple[Step, ...], names: Sequence[str]) -> Finding:
    rank, step = run.ranks[0], steps[0]
    # Clipping by a norm of all gradients spreads the fault of some.
    unclipped = [{one.name: one.unclipped for one in own.gradients if one.unclipped} for own in steps]
    names = [name for name in names if not equal([one.get(name) for one in unclipped])] or names
    # Of a loss over all ranks, some local gradients are equal before any average.
    local = [{one.name: one.local for one in own.gradients} for own in steps]
    same = [name for name in local[0] if name not in names]
    others = sum(None in (own := [one.get(name) for one in local]) or not equal(own) for name in same)
    evidence = f"in step {step.number}, {ranks(range(len(steps)))} applied different gradients of {listed(names)}"
    if run.has(TENSOR_PARALLEL) and (finding := _different_samples(run, step)):
        return finding
    if factor := _factor_between(steps, names):
        return Finding(
            "gradients-not-averaged",
            "ranks multiply averaged gradients by factors of their own, as of other norms, or other scales of losses",
            f"{evidence}: those of rank 1 are {factor:.3g} times those of rank 0",
            "scale losses alike, and clip averaged gradients by the same bound and the norm of the same gradients",
            step.line,
        )
    if others:
        evidence += f", and the same of {others} other weights"
        which, what = "gradients-partly-averaged", "each rank applies its own gradients of some weights"
    else:
        which, what = "gradients-not-averaged", "each rank applies its own gradients"
    return Finding(which, f"{what}: nothing averages them", evidence, _averaging(rank, step), step.line)


def _different_samples(run: Run, step: Step) -> Finding | None:
    """Find ranks that share the work on a model, and have different samples."""
    rows = [{row for one in rank.forwards(training=True) if one.step == 1 for row in one.rows} for rank in run.ranks]
    num_common = len(set.intersection(*rows))
    if 2 * num_common >= len(rows[0]):
        return None
    return Finding(
        "samples-differ",
        "ranks that share the work on a model (tensor parallelism) have different samples",
        f"in step 1, {num_common} of {len(rows[0])} samples are on all ranks",
        "give all ranks of a mesh the same samples: DistributedSampler(data, num_replicas=N, rank=R), with the numbers "
        "of the data-parallel dimension",
        step.line,
    )


def _factor_between(steps: Sequence[Step], names: Sequence[str]) -> float | None:
    """Return the ratio of the gradients of rank 1 to those of rank 0, if these are proportional.

    All single numbers are, whose projections differ by signs only.
    """
    first, second = ({one.name: one.applied for one in step.gradients if one.name in names} for step in steps[:2])
    pairs = [(np.array(second.get(name)), np.array(one)) for name, one in first.items() if one and second.get(name)]
    is_number = len(pairs) == 1 and np.ptp(np.abs(pairs[0][1])) <= SAME * np.abs(pairs[0][1]).max()
    return factor_of(pairs) if len(pairs) == len(names) and not is_number else None


def _averaging(rank: Rank, step: Step) -> str:
    bypassed = [one for one in rank.all(Forward) if one.bypasses]
    kinds = {one.line: one.kind for one in rank.all(Wrapped)}
    kind = kinds.get(step.wrapper, "wrapper")
    if step.wrapper and not step.num_unwrapped:
        if step.bypass == "no_sync":
            return f"leave {kind}.no_sync() before the last backward pass of a step, so that this averages"
        if bypassed or step.bypass == "inner":
            line = bypassed[0].line if bypassed else step.line
            return f"call the {kind} ({step.wrapper}) itself, not the model inside of it ({line})"
        if kind.startswith("hvd.") and not step.is_wrapped:  # whose averages nothing waits for
            return f"step the optimizer that {kind} has returned ({step.wrapper}), not the one given to it"
    if step.wrapper and not step.num_unwrapped and kind == "DistributedDataParallel":
        return f"average in the communication hook of {kind} ({step.wrapper}), and do not replace gradients after that"
    if step.wrapper:
        return f"give {kind} ({step.wrapper}) all weights that the optimizer trains"
    own = f" for the weights of the optimizer that steps in {step.line}" if kinds else ""
    if rank.library == "horovod.tensorflow":
        return (
            "import allstep.tensorflow.horovod_keras as hvd; model.compile(hvd.DistributedOptimizer(optimizer), ...): "
            "Horovod's own wrapper averages nothing on Keras 3; in a custom loop, "
            "tape = hvd.DistributedGradientTape(tape)"
        )
    if not any(one.local for one in step.gradients):
        return "before the step, all-reduce the gradients that the script sets, and divide them by the number of ranks"
    if rank.library == "torch.distributed":
        return f"model = DistributedDataParallel(model){own}, and call that"
    return f"optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters()){own}"
