"""Check that optimizers apply the mean of the gradients that the ranks have computed.

Projections are linear: those of the applied gradient are s times the mean of the ranks' local ones, where s is 1 for an
average, the number of ranks N for a sum, and 1/N for an average of averages. Clipping and loss scales give other
factors, which are the same on all ranks and are not a fault.
"""

import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from allstep.commands.prove.checks.carrying import carries
from allstep.commands.prove.checks.weights import differing, has_shards, rejoins
from allstep.commands.prove.findings import Finding, listed, ranks
from allstep.commands.prove.records import (
    ADASUM,
    APPLIED,
    AVERAGES_WEIGHTS,
    BACKWARD,
    RUNNING,
    TENSOR_PARALLEL,
    Collective,
    EarlyChange,
    Forward,
    Gradient,
    Projections,
    Sent,
    Step,
    Waiting,
    Wrapped,
)
from allstep.commands.prove.runs import Rank, Run, Runs

_SAME = 1e-3
"""Relative difference of projections due to rounding, even to 16 bits; local gradients differ by far more."""
_NEAR = 0.02
"""Relative tolerance of a factor."""
_NEAR_LOSS = {True: 0.25, False: 0.1}
"""Relative tolerance of a ratio of losses on different samples, by whether the runs began with the same weights."""
_WAIT = "optimizer.synchronize() before that, and after it: with optimizer.skip_synchronize(): optimizer.step()"
_FIRST_STEPS = 3
"""Number of steps whose losses must agree on such a ratio."""
_MANY_STEPS = 20
"""Number of steps whose losses tell a sum from a mean, where samples are drawn anew in each run."""


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
    for optimizer in range(1, run.num_optimizers + 1):
        if has_shards(run, optimizer):
            continue
        if apart := unequal(run.steps(optimizer)):
            if not _averages_weights(run, optimizer):
                yield _not_averaged(run, *apart)
        elif run.num_ranks > 1:
            yield from _wrong_factor(runs, optimizer)


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
            if np.linalg.norm(rest) > max(_NEAR * np.linalg.norm(after), 10 * _SAME * scale):
                return Finding(
                    "clipped-before-average",
                    "each rank changes its own gradients before they are averaged, which is not what one rank with "
                    "the whole batch does",
                    f"the gradient of {first.name} that ranks send is not a multiple of the one from backward",
                    "average first, and then clip or change gradients",
                    first.line,
                )
    return None


def _averages_weights(run: Run, optimizer: int) -> bool:
    """Return whether ranks apply different gradients, but have the same weights before every or some later step."""
    pairs = list(run.steps(optimizer))
    weights = [[step.weights for step in steps] for steps in pairs[1:]]
    has_weights = len(pairs) > 2 and all(all(own) for own in weights)
    return rejoins(run, optimizer) or (has_weights and not any(map(differing, weights)))


def unequal(together: Iterable[tuple[Step, ...]]) -> tuple[tuple[Step, ...], list[str]] | None:
    """Return the first of some steps whose applied gradients differ between ranks, and the names of these gradients."""
    for steps in together:
        applied = [{one.name: one.applied for one in step.gradients} for step in steps]
        names = [name for name in applied[0] if not _equal([one.get(name) for one in applied])]
        if names:
            return steps, names
    return None


def _equal(projections: Sequence[Projections | None]) -> bool:
    first, *others = projections
    if first is None or None in others:
        return all(other is None for other in others) and first is None
    scale = np.abs(first).max()
    return all(np.abs(np.subtract(first, other)).max() <= _SAME * scale for other in others if other)


def _not_averaged(run: Run, steps: tuple[Step, ...], names: Sequence[str]) -> Finding:
    rank, step = run.ranks[0], steps[0]
    # Clipping by a norm of all gradients spreads the fault of some.
    unclipped = [{one.name: one.unclipped for one in own.gradients if one.unclipped} for own in steps]
    names = [name for name in names if not _equal([one.get(name) for one in unclipped])] or names
    # Of a loss over all ranks, some local gradients are equal before any average.
    local = [{one.name: one.local for one in own.gradients} for own in steps]
    same = [name for name in local[0] if name not in names]
    others = sum(None in (own := [one.get(name) for one in local]) or not _equal(own) for name in same)
    evidence = f"in step {step.number}, {ranks(range(len(steps)))} applied different gradients of {listed(names)}"
    if run.has(TENSOR_PARALLEL) and (finding := _different_samples(run, step)):
        return finding
    if factor := _factor_between(steps, names):
        return Finding(
            "gradients-not-averaged",
            "ranks multiply averaged gradients by factors of their own, as when each clips by another norm",
            f"{evidence}: those of rank 1 are {factor:.3g} times those of rank 0",
            "clip averaged gradients on all ranks alike, by the same bound and the norm of the same gradients",
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
    is_number = len(pairs) == 1 and np.ptp(np.abs(pairs[0][1])) <= _SAME * np.abs(pairs[0][1]).max()
    return _factor(pairs) if len(pairs) == len(names) and not is_number else None


def _wrapper_without_step(rank: Rank, step: Step) -> Wrapped | None:
    """Return Horovod's wrapper if the wrapped optimizer steps itself, which does not wait for the averages."""
    horovod = [one for one in rank.all(Wrapped) if one.kind.startswith("hvd.") and one.line == step.wrapper]
    return horovod[0] if horovod and not step.is_wrapped else None


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
        if wrapper := _wrapper_without_step(rank, step):
            return f"step the optimizer that {wrapper.kind} has returned ({wrapper.line}), not the one given to it"
    if step.wrapper:
        return f"give {kind} ({step.wrapper}) all weights that the optimizer trains"
    own = f" for the weights of the optimizer that steps in {step.line}" if kinds else ""
    if rank.library == "horovod.tensorflow":
        return (
            "import allstep.tensorflow.horovod_keras as hvd; model.compile(hvd.DistributedOptimizer(optimizer), ...): "
            "Horovod's own wrapper averages nothing on Keras 3; in a custom loop, "
            "tape = hvd.DistributedGradientTape(tape)"
        )
    if rank.library == "torch.distributed":
        return f"model = DistributedDataParallel(model){own}, and call that"
    return f"optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters()){own}"


def _wrong_factor(runs: Runs, optimizer: int) -> Iterator[Finding]:
    run = runs.together
    factors = factors_of(run, optimizer)
    if not factors:
        return
    alone = factors_of(runs.alone, optimizer) if runs.alone else []
    scale = alone[0] if alone and np.ptp(alone) <= _SAME * alone[0] else 1.0  # of a GradScaler, or of a hook
    factor, size = statistics.median(factors) / scale, run.num_ranks
    if 2 * sum(_near(one / scale, factor) for one in factors) <= len(factors):
        return  # of a norm that the script clips
    first = next(run.steps(optimizer))[0]
    if _near(factor, size):
        ratios = _loss_ratios(runs, optimizer, max_steps=_MANY_STEPS)
        share = _nearest_share(ratios, size, is_sure=len(ratios) <= 1 or _begin_alike(runs, optimizer))
    elif any(one.unclipped and one.unclipped != one.applied for one in first.gradients):
        share = 1.0  # such as of policies, whose losses differ by chance
    else:
        share = _certain_share(_loss_ratios(runs, optimizer), size, runs, optimizer)
    evidence = f"the applied gradient is {factor:.3g} times the mean of the {size} ranks' own, in {len(factors)} steps"
    if share != 1:
        evidence += f", and the loss {share:.3g} times that of one rank"
    if _near(factor * share, size) and share == 1:
        yield Finding(
            "gradients-summed",
            f"gradients are added up over the ranks and not averaged: steps are {size} times too long",
            evidence,
            "divide each replica's sum of losses by the global batch, not by its own share of it: "
            "tf.nn.compute_average_loss(losses, global_batch_size=...)"
            if run.library == "tf.distribute"
            else "average: op=hvd.Average, or divide the sum by the number of ranks",
            first.line,
        )
    elif _near(factor, 1 / size) and share == 1:
        yield Finding(
            "gradients-averaged-twice",
            f"gradients are averaged, and divided by the number of ranks again: steps are {size} times too short",
            evidence,
            f"leave the second average out{_second_average(run.ranks[0])}",
            first.line,
        )
    elif _near(factor * share, 1 / size) or _near(factor * share, size):
        yield Finding(
            "loss-scaled",
            "the loss is scaled by the number of ranks, besides the average of gradients",
            evidence,
            "divide by the global batch, once: Keras' losses do so in a strategy, unless their reduction is none"
            if run.library == "tf.distribute"
            else "let the loss be the mean over the rank's own samples; the wrapper does the rest",
            first.line,
        )


def factors_of(run: Run, optimizer: int) -> list[float]:
    """Return the factors of the mean that steps apply; those of single weights if values of others are clipped."""
    pairs = [
        [pair for own in zip(*(one.gradients for one in steps), strict=False) if (pair := _pair(own))]
        for steps in run.steps(optimizer)
    ]
    whole = [factor for own in pairs if (factor := _factor(own)) is not None]
    return whole or [factor for own in pairs for pair in own if (factor := _factor([pair])) is not None]


def _factor(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> float | None:
    """Return the ratio of the applied gradients to the means of the local ones; None if they are not proportional."""
    if not pairs:
        return None
    applied, mean = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    size = float(mean @ mean)
    if size == 0:
        return None
    factor = float(applied @ mean) / size
    return factor if np.linalg.norm(applied - factor * mean) <= 0.01 * np.linalg.norm(applied) else None


def _pair(gradients: Sequence[Gradient]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return a gradient as it is applied, or averaged and not yet clipped, and the mean of the local ones."""
    local = [one.local for one in gradients if one.local]
    unclipped = [one.unclipped for one in gradients]
    applied = unclipped[0] if _equal(unclipped) and unclipped[0] else gradients[0].applied
    return None if len(local) < len(gradients) or applied is None else (np.array(applied), np.mean(local, axis=0))


def _loss_ratios(runs: Runs, optimizer: int, *, max_steps: int = _FIRST_STEPS) -> list[float]:
    """Return the ratios of the first steps' losses on several ranks to those on one; empty if they tell nothing.

    If one rank trains on the same samples in its first steps, the only ratio is that on these samples. Otherwise a few
    losses are needed, since those of small batches differ by chance.
    """
    if runs.alone is None or _has_buffers_apart(runs.together) or _compares_ranks(runs):
        return []
    if (ratio := _ratio_on_same_samples(runs, optimizer)) is not None:
        return [ratio]
    pairs = zip(runs.alone.steps(optimizer), runs.together.steps(optimizer), strict=False)
    losses = [(_loss(one), _loss(several)) for one, several in itertools.islice(pairs, max_steps)]
    ratios = [several / one for one, several in losses if one and several is not None]
    return ratios if len(ratios) >= _FIRST_STEPS else []


def _compares_ranks(runs: Runs) -> bool:
    """Return whether losses depend on samples of other ranks, which a model, or the script after it, gathers."""
    gathers: list[Collective] = []
    for record in runs.together.ranks[0].records:
        if isinstance(record, Forward) and record.rows:
            gathers = []
            if record.is_training and any("gather" in kind for kind in record.collectives):
                return True
        elif isinstance(record, Collective) and "gather" in record.kind:
            gathers.append(record)
        elif isinstance(record, Waiting) and record.what == BACKWARD and gathers:
            return any(carries(runs.script, one.callers, (record.line,)) for one in gathers)
    return False


def _has_buffers_apart(run: Run) -> bool:
    """Return whether the models of ranks begin with other constants, by which their losses differ."""
    first = [next((one.buffers for one in rank.forwards(training=True) if one.buffers), {}) for rank in run.ranks]
    return any(not name.endswith(RUNNING) for name in differing(first))


def _ratio_on_same_samples(runs: Runs, optimizer: int) -> float | None:
    """Return the ratio of the loss of the first step to that on one rank over the same samples; None without any."""
    assert runs.alone
    first = next(runs.together.steps(optimizer))
    together = {row for rank, step in zip(runs.together.ranks, first, strict=True) for row in _rows(rank, step)}
    losses = []
    for [step] in runs.alone.steps(optimizer):
        rows = _rows(runs.alone.ranks[0], step)
        if step.loss is None or not rows or not rows <= together:
            break
        losses.append(step.loss)
        together -= rows
    several = _loss(first)
    return several / statistics.mean(losses) if several is not None and losses and not together else None


def _rows(rank: Rank, step: Step) -> set[str]:
    """Return the samples of the last calls of the model before a step, from which the step's losses are computed."""
    calls = [one for one in rank.forwards(training=True) if one.step == step.number and one.rows]
    return {row for one in calls[-max(1, step.num_passes) :] for row in one.rows}


def _nearest_share(ratios: Sequence[float], size: int, *, is_sure: bool) -> float:
    """Return which of 1, 1/N and 1/N**2 the ratios are nearest to, if gradients are sums over N ranks; 1/N is right.

    If the runs began with other weights, which change losses as well, a ratio that is not near 1 tells nothing.
    """
    ratio = statistics.median(ratios) if ratios else 1.0
    share = min((1.0, 1 / size, size**-2), key=lambda share: abs(ratio - share) / (ratio + share))
    return 1 / size if share == 1 and ratio < 1 - _NEAR_LOSS[False] and not is_sure else share


def _certain_share(ratios: Sequence[float], size: int, runs: Runs, optimizer: int) -> float:
    """Return the ratio of the losses, if gradients are averages: 1, or a power of the number of ranks.

    The first ratio must be near that power, and each ratio of the first steps nearer to it than to 1, since a small
    batch may have twice the loss of another one by chance.
    """
    if runs.alone is None or not ratios:
        return 1.0
    bound = _NEAR_LOSS[_begin_alike(runs, optimizer)]
    share = next((float(share) for share in (size**-2, 1 / size, size) if abs(ratios[0] / share - 1) < bound), 1.0)
    return share if all(abs(ratio / share - 1) < abs(ratio - 1) for ratio in ratios) else 1.0


def _begin_alike(runs: Runs, optimizer: int) -> bool:
    """Return whether both runs began with the same weights."""
    first = [next(run.steps(optimizer))[0] for run in (runs.alone, runs.together) if run]
    return len(first) > 1 and first[0].weights == first[1].weights


def _loss(steps: Sequence[Step]) -> float | None:
    """Return the loss of a step, as the mean over the ranks."""
    # Before Keras' first step nothing may be broadcast yet: only rank 0 has the weights of the run on one rank.
    is_alike = not differing([step.weights for step in steps])
    losses = [step.loss for step in (steps if is_alike else steps[:1]) if step.loss is not None]
    return statistics.mean(losses) if losses else None


def _near(value: float, target: float) -> bool:
    return abs(value / target - 1) < _NEAR


def _second_average(rank: Rank) -> str:
    """Return the lines of collectives that the script itself calls between backward and step, in parentheses."""
    waits = {step.line for step in rank.all(Step)}
    lines = dict.fromkeys(one.line for one in rank.all(Collective) if one.kind in ("all_reduce", "allreduce"))
    own = [line for line in lines if line and line not in waits]
    return f" (the script's own all-reduces: {listed(own)})" if own else ""
