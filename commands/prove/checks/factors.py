"""Check by which factor the gradients that optimizers apply differ from the mean of those that the ranks have computed.

Projections are linear: those of the applied gradient are s times the mean of the ranks' local ones, where s is 1 for an
average, the number of ranks N for a sum, and 1/N for an average of averages. Clipping and loss scales give other
factors, which are the same on all ranks and are not a fault.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence

import numpy as np

from allstep.commands.prove.checks.carrying import compares_ranks
from allstep.commands.prove.checks.weights import differing
from allstep.commands.prove.findings import Finding, listed
from allstep.commands.prove.rank import Rank, reductions
from allstep.commands.prove.records import RUNNING, Gradient, Projections, Step
from allstep.commands.prove.runs import Run, Runs

SAME = 1e-3
"""Relative difference of projections due to rounding, even to 16 bits; local gradients differ by far more."""
NEAR = 0.02
"""Relative tolerance of a factor."""
_NEAR_LOSS = {True: 0.25, False: 0.1}
"""Relative tolerance of a ratio of losses on different samples, by whether the runs began with the same weights."""
_FIRST_STEPS = 3
"""Number of steps whose losses must agree on such a ratio."""
_MANY_STEPS = 20
"""Number of steps whose losses tell a sum from a mean, where samples are drawn anew in each run."""


def wrong_factor(runs: Runs, optimizer: int) -> Iterator[Finding]:
    run = runs.together
    factors = factors_of(run, optimizer)
    if not factors:
        return
    alone = factors_of(runs.alone, optimizer) if runs.alone else []
    scale = alone[0] if alone and np.ptp(alone) < SAME * alone[0] else 1.0  # of a GradScaler, or of a hook
    factor, size = statistics.median(factors) / scale, run.num_ranks
    first = next(run.steps(optimizer))[0]
    ratio = gradient_ratio(runs, optimizer)
    if ratio and near(ratio, 1):
        return
    varies = 2 * sum(near(one / scale, factor) for one in factors) <= len(factors)
    compares = near(factor, 1) and compares_ranks(runs)
    if ratio and (near(ratio, size) or near(ratio, 1 / size)) and (varies or compares):
        yield Finding(
            "loss-scaled" if compares else "gradients-summed" if ratio > 1 else "gradients-averaged-twice",
            "steps are longer or shorter by the number of ranks than those of one rank with the whole batch",
            f"the applied gradient is {ratio:.3g} times that of one rank with the same weights and samples",
            "gather by torch.distributed.nn.all_gather, whose gradients reach all ranks; the wrapper does the rest"
            if compares
            else "divide by the samples, or tokens, of all ranks, and multiply by the ranks that a wrapper divides by",
            first.line,
        )
    is_set = any(one.is_set for one in first.gradients)
    # Factors vary of a norm that the script clips, or of numbers of tokens.
    if varies or compares or (is_set and not _sends_as_much(runs, optimizer, is_sum=factor > 1)):
        return
    if near(factor, size):
        ratios = _loss_ratios(runs, optimizer, max_steps=_MANY_STEPS)
        share = _nearest_share(ratios, size, is_sure=len(ratios) <= 1 or _begin_alike(runs, optimizer))
    else:
        ratios = _loss_ratios(runs, optimizer)
        clips = any(one.unclipped and one.unclipped != one.applied for one in first.gradients)
        tells = not clips or _begin_alike(runs, optimizer)
        share = _certain_share(ratios, size, runs, optimizer) if tells else 1.0
        if clips and len(ratios) > 1 and any(abs(one / share - 1) > 0.05 for one in ratios):
            share = 1.0  # by chance, such as of policies
    evidence = f"the applied gradient is {factor:.3g} times the mean of the {size} ranks' own, in {len(factors)} steps"
    if share != 1:
        evidence += f", and the loss {share:.3g} times that of one rank"
    if near(factor * share, size) and share == 1:
        yield Finding(
            "gradients-summed",
            f"gradients are added up over the ranks and not averaged: steps are {size} times too long",
            evidence,
            "divide each replica's sum of losses by the global batch, not by its own share of it: "
            "tf.nn.compute_average_loss(losses, global_batch_size=...)"
            if run.library == "tf.distribute"
            else f"{'op=hvd.Average, or ' * ('horovod' in run.library)}divide the sum by the number of ranks",
            first.line,
        )
    elif near(factor, 1 / size) and share == 1:
        yield Finding(
            "gradients-averaged-twice",
            f"gradients are averaged, and divided by the number of ranks again: steps are {size} times too short",
            evidence,
            f"leave the second average out{_second_average(run.ranks[0])}",
            first.line,
        )
    elif near(factor * share, 1 / size) or near(factor * share, size):
        yield Finding(
            "loss-scaled",
            "the loss is scaled by the number of ranks, besides the average of gradients",
            evidence,
            "divide by the global batch, once: Keras' losses do so in a strategy, unless their reduction is none"
            if run.library == "tf.distribute"
            else "let the loss be the mean over the rank's own samples; the wrapper does the rest",
            first.line,
        )


def gradient_ratio(runs: Runs, optimizer: int) -> float | None:
    """Return the ratio of the first applied gradient to that of one rank with the same weights and samples, if any."""
    return factor_of(beside_one_rank(runs, optimizer))


def beside_one_rank(runs: Runs, optimizer: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the first applied gradients and those of one rank; none without the same weights and samples."""
    if runs.alone is None or runs.alone.num_optimizers < optimizer or not _begin_alike(runs, optimizer):
        return []
    several, [alone] = next(runs.together.steps(optimizer)), next(runs.alone.steps(optimizer))
    rows = {row for rank, step in zip(runs.together.ranks, several, strict=True) for row in _rows(rank, step)}
    expected = {one.name: one.unclipped or one.applied for one in alone.gradients}
    applied = {one.name: one.unclipped or one.applied for one in several[0].gradients}
    if not rows or rows != _rows(runs.alone.ranks[0], alone) or expected.keys() != applied.keys():
        return []
    return [(np.array(one), np.array(expected[name])) for name, one in applied.items() if one and expected[name]]


def factors_of(run: Run, optimizer: int) -> list[float]:
    """Return the factors of the mean that steps apply; those of single weights if values of others are clipped."""
    pairs = [
        [pair for own in zip(*(one.gradients for one in steps), strict=False) if (pair := _pair(own))]
        for steps in run.steps(optimizer)
    ]
    whole = [factor for own in pairs if (factor := factor_of(own)) is not None]
    return whole or [factor for own in pairs for pair in own if (factor := factor_of([pair])) is not None]


def factor_of(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> float | None:
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
    applied = unclipped[0] if equal(unclipped) and unclipped[0] else gradients[0].applied
    return None if len(local) < len(gradients) or applied is None else (np.array(applied), np.mean(local, axis=0))


def _loss_ratios(runs: Runs, optimizer: int, *, max_steps: int = _FIRST_STEPS) -> list[float]:
    """Return the ratios of the first steps' losses on several ranks to those on one; empty if they tell nothing.

    If one rank trains on the same samples in its first steps, the only ratio is that on these samples. Otherwise a few
    losses are needed, since those of small batches differ by chance.
    """
    if runs.alone is None or _has_buffers_apart(runs.together) or compares_ranks(runs):
        return []
    if (ratio := _ratio_on_same_samples(runs, optimizer)) is not None:
        return [ratio]
    pairs = zip(runs.alone.steps(optimizer), runs.together.steps(optimizer), strict=False)
    losses = [(_loss(one), _loss(several)) for one, several in itertools.islice(pairs, max_steps)]
    ratios = [several / one for one, several in losses if one and several is not None]
    return ratios if len(ratios) >= _FIRST_STEPS else []


def _sends_as_much(runs: Runs, optimizer: int, *, is_sum: bool) -> bool:
    """Return whether the gradients that ranks set and send are too long for a sum, or too short for a second mean.

    Those of a share of the samples, divided by all samples, are 0.7 times as long as those of one rank, or less.
    """
    pairs = zip(runs.alone.steps(optimizer), runs.together.steps(optimizer), strict=False) if runs.alone else ()
    ratios = [_length(several) / one for alone, several in pairs if (one := _length(alone))]
    return bool(ratios) and (statistics.median(ratios) > 0.85 if is_sum else statistics.median(ratios) < 1.2)


def _length(steps: Sequence[Step]) -> float:
    """Return the mean length of the gradients of ranks before they are reduced."""
    values = [value for step in steps for one in step.gradients for value in one.local or one.applied or ()]
    return float(np.linalg.norm(values)) / math.sqrt(len(steps))


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
    ratio = first_ratio(ratios) if ratios else 1.0
    share = min((1.0, 1 / size, size**-2), key=lambda share: abs(ratio - share) / (ratio + share))
    return 1 / size if share == 1 and ratio < 1 - _NEAR_LOSS[False] and not is_sure else share


def first_ratio(ratios: Sequence[float]) -> float:
    """Return the ratio in the first step without noise, by the median trend that steps of other lengths give."""
    if min(ratios) <= 0:
        return statistics.median(ratios)
    logs = list(enumerate(np.log(ratios)))
    pairs = itertools.combinations(logs, 2)
    slope = statistics.median([(after - old) / (later - index) for (index, old), (later, after) in pairs] or [0.0])
    return float(np.exp(statistics.median(value - slope * index for index, value in logs)))


def _certain_share(ratios: Sequence[float], size: int, runs: Runs, optimizer: int) -> float:
    """Return the ratio of the losses, if gradients are averages: 1, or a power of the number of ranks.

    The first ratio must be near that power, and each ratio of the first steps nearer to it than to 1, since a small
    batch may have twice the loss of another one by chance, and after a step with a large rate.
    """
    if runs.alone is None or not ratios:
        return 1.0
    one, several = (_loss(next(run.steps(optimizer))) for run in (runs.alone, runs.together))
    ratios = [*ratios, several / one] if one and several is not None else ratios
    bound = _NEAR_LOSS[_begin_alike(runs, optimizer)]
    share = next((float(share) for share in (size**-2, 1 / size, size) if abs(ratios[0] / share - 1) < bound), 1.0)
    return share if all(abs(ratio / share - 1) < abs(ratio - 1) for ratio in ratios) else 1.0


def _begin_alike(runs: Runs, optimizer: int) -> bool:
    """Return whether both runs began with the same weights."""
    both = (run.steps(optimizer) for run in (runs.alone, runs.together) if run)
    first = [steps[0] for own in both for steps in itertools.islice(own, 1)]
    return len(first) > 1 and [*first[0].weights.values()] == [*first[1].weights.values()]  # Keras' names may differ


def _loss(steps: Sequence[Step]) -> float | None:
    """Return the loss of a step, as the mean over the ranks."""
    # Before Keras' first step nothing may be broadcast yet: only rank 0 has the weights of the run on one rank.
    is_alike = not differing([step.weights for step in steps])
    losses = [step.loss for step in (steps if is_alike else steps[:1]) if step.loss is not None]
    return statistics.mean(losses) if losses else None


def near(value: float, target: float) -> bool:
    return abs(value - target) < NEAR * target


def _second_average(rank: Rank) -> str:
    """Return the lines of all-reduces that the script itself calls between backward and step, in parentheses."""
    calls = [(step.line, one) for step, since in reductions(rank) for one in since]
    lines = dict.fromkeys(one.line for line, one in calls if one.line != line and one.kind.startswith("all"))
    return f" (the script's own all-reduces: {listed(lines)})" if lines else ""


def equal(projections: Sequence[Projections | None]) -> bool:
    first, *others = projections
    if first is None or None in others:
        return all(other is None for other in others) and first is None
    scale = np.abs(first).max()
    return all(np.abs(np.subtract(first, other)).max() <= SAME * scale for other in others if other)
