"""Check that learning rates are the same on all ranks, follow the global batch, linearly for SGD (Goyal et al. 2017),
and fall as on one rank."""

import ast
import itertools
import math
import re
from collections.abc import Iterator, Sequence

from allstep.commands.prove.checks.samples import global_batches, same_samples
from allstep.commands.prove.checks.weights import rejoins
from allstep.commands.prove.findings import Finding, listed
from allstep.commands.prove.observer.progress import parsed
from allstep.commands.prove.records import ADASUM, AVERAGES_WEIGHTS, FOLLOWS_LOSSES, Collective, Step, Unseen
from allstep.commands.prove.runs import Run, Runs

_NEAR = 0.05
_LINEAR = ("SGD", "LARS", "Momentum")
"""Optimizers whose rate is scaled linearly; that of others is often not scaled, or by the square root."""

_RATES = {"lr", "learning_rate"}
_LOSS = re.compile(r"(?<![^_])(loss|losses|best|metric|score|accuracy|perplexity)(?![^_])")
_MAX_DEPTH = 3
"""Number of assignments from a loss to a rate."""


def check(runs: Runs) -> Iterator[Finding]:
    """Compare the learning rates of the ranks, and those on one rank and on several with the global batches there."""
    if finding := _differs(runs.together):
        yield finding
        return
    if runs.alone is None or runs.together.has(ADASUM):  # Adasum needs no scaling
        return
    alone, together = _steps(runs.alone), _steps(runs.together)
    batch_alone, batch_together = global_batches(runs)
    if not (alone and together and batch_alone and batch_together and alone[0].learning_rates[:1]):
        return
    rate, scaled = alone[0].learning_rates[0], together[0].learning_rates[0]
    growth = batch_together / batch_alone
    finding = None if follows_losses(runs) else _falls_faster(runs, alone, together, growth)
    ended_early = len(together) == 1 < len(alone)  # such as where the script's library stops it
    if warms_up(runs) or ended_early or not rate:  # the end of a warm-up may not be seen
        yield from [finding] if finding else []
        return
    ratio = scaled / rate
    evidence = (
        f"the learning rate is {rate:.3g} on one rank and {scaled:.3g} on {runs.together.num_ranks}, the global batch "
        f"{batch_alone} and {batch_together} samples"
    )
    # Steps between averages of weights (local SGD) are of each rank's own batch.
    averages_weights = runs.together.has(AVERAGES_WEIGHTS) or rejoins(runs.together, 1) or _steps_apart(runs.together)
    is_linear = any(name in together[0].kind for name in _LINEAR) and not averages_weights
    if growth > 1 + _NEAR and is_linear and _near(ratio, 1):
        yield Finding(
            "learning-rate-not-scaled",
            f"the global batch grows {growth:.3g} times, and the learning rate does not",
            evidence,
            "lr=base_lr * size, with a warm-up over the first epochs; or divide the batch of each rank by size",
            together[0].line,
        )
    elif ratio > growth * (1 + _NEAR) and not _near(ratio, math.sqrt(growth)) and ratio > 1 + _NEAR:
        yield Finding(
            "learning-rate-scaled-twice",
            f"the learning rate grows {ratio:.3g} times, and the global batch {growth:.3g} times",
            evidence,
            "scale the learning rate once: lr=base_lr * size where each rank keeps its batch, lr=base_lr where it is "
            "divided",
            together[0].line,
        )
    elif finding:
        yield finding


def _steps_apart(run: Run) -> bool:
    """Return whether ranks with the same samples, whose weights cannot differ, average no gradients in PyTorch."""
    if "tensorflow" in run.library or "tf." in run.library or not isinstance(same_samples(run), Finding):
        return False
    step, records = run.ranks[0].steps()[0], run.ranks[0].records
    first = run.ranks[0].forwards(training=True)[0]
    calls = records[records.index(first) : records.index(step)]
    is_averaged = step.is_wrapped or (step.wrapper and not step.bypass)
    return not is_averaged and not any(isinstance(one, Collective) for one in calls)


def warms_up(runs: Runs) -> bool:
    """Return whether the rate on several ranks rises, in the steps or epochs that are seen."""
    rates = [step.learning_rates[0] for step in _steps(runs.together) if step.learning_rates]
    return len(rates) > 2 and max(rates) > rates[0] * (1 + _NEAR)


def follows_losses(runs: Runs) -> bool:
    """Return whether rates are lowered where losses stay the same, which these need not do in both runs."""
    if any(one.what == FOLLOWS_LOSSES for rank in runs.together.ranks for one in rank.all(Unseen)):
        return True
    found = set(_RATES)
    sources = _sources(parsed(runs.script)) if runs.script else {}
    for _ in range(_MAX_DEPTH):
        found |= {one for name in found for one in sources.get(name, ())}
    return any(map(_LOSS.search, found))


def _sources(tree: ast.AST) -> dict[str, set[str]]:
    """Return the names of which a script's variables and attributes are made, and of the tests around that."""
    sources: dict[str, set[str]] = {}

    def visit(node: ast.AST, tests: set[str]) -> None:
        if isinstance(node, ast.Call):
            is_setter = getattr(node.func, "attr", "") == "assign"
            for name in _targets(getattr(node.func, "value", None) if is_setter else node.func):
                sources.setdefault(name, set()).update(tests, _names(*node.args) if is_setter else ())
        elif isinstance(node, (ast.Assign, ast.AugAssign)):
            for name in _targets(*getattr(node, "targets", [getattr(node, "target", None)])):
                sources.setdefault(name, set()).update(tests, _names(node.value))
        if isinstance(node, (ast.If, ast.While)):
            tests = tests | _names(node.test)
        elif isinstance(node, ast.FunctionDef):
            tests = {node.name}
        for child in ast.iter_child_nodes(node):
            visit(child, tests)

    visit(tree, set())
    return sources


def _targets(*nodes: ast.AST | None) -> set[str]:
    """Return the names of what is set: the variable, the attribute, or the word in brackets."""
    found = set()
    for node in nodes:
        if isinstance(node, (ast.Tuple, ast.List)):
            found |= _targets(*node.elts)
        elif isinstance(node, ast.Subscript):
            found |= _targets(node.slice) or _targets(node.value)
        else:
            found |= {getattr(node, "id", getattr(node, "attr", getattr(node, "value", None)))}
    return {name for name in found if isinstance(name, str)}


def _names(*nodes: ast.AST) -> set[str]:
    """Return the names, attributes and words in nodes; of an item with a name, only that."""
    found = _targets(*nodes)
    for node in nodes:
        if not (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)):
            found |= _names(*ast.iter_child_nodes(node))
    return found


def _differs(run: Run) -> Finding | None:
    for optimizer in range(1, run.num_optimizers + 1):
        for steps in run.steps(optimizer):
            rates = [step.learning_rates for step in steps]
            pairs = itertools.chain(*(zip(rates[0], other, strict=False) for other in rates[1:]))
            if not all(math.isclose(*pair, rel_tol=1e-6) for pair in pairs):
                return Finding(
                    "learning-rate-differs",
                    "ranks have different learning rates, so that equal gradients move weights apart",
                    f"in step {steps[0].number}, the rates are {listed([f'{one[0]:.3g}' for one in rates if one])}",
                    "change rates on all ranks alike: give schedulers such as ReduceLROnPlateau a value that was "
                    "averaged over the ranks",
                    steps[0].line,
                )
    return None


def _falls_faster(runs: Runs, alone: Sequence[Step], together: Sequence[Step], growth: float) -> Finding | None:
    """Find a schedule that is ahead of that of one rank at equal samples, and at equal epochs.

    Epochs are cut, so that samples are counted within an epoch only. Rates that rise again, as in cycles, tell nothing.
    """
    falls = _fall(alone), _fall(together)
    # A rate below the schedule's lowest one rises to that.
    if not all(falls) or len({min(fall) > 1 for fall in falls}) > 1:
        return None
    ahead = 1 / sum(step.loop == together[0].loop for step in together)  # of a last step, before others
    pairs = [(*pair, 0.0) for pair in _at_equal_epochs(alone, together)]
    pairs += [(*pair, ahead) for pair in _at_equal_samples(alone, together, growth)]
    for step, one, margin in pairs:
        expected, share = (of.get(own.number) for of, own in zip(falls, (one, step), strict=True))
        if expected and share is not None and share < expected * (1 - _NEAR) - margin:
            return Finding(
                "schedule-too-fast",
                "the learning rate falls faster than on one rank: a scheduler steps once for each rank",
                f"in step {step.number} of {runs.together.num_ranks} ranks the rate is {share:.3g} times its "
                f"highest value, on one rank {expected:.3g} times after as many samples",
                "step the scheduler once a step, or epoch, on each rank",
                step.line,
            )
    return None


def may_fall_slower(runs: Runs) -> Iterator[str]:
    """Yield a schedule that has the same rates by steps as on one rank, although an epoch has fewer steps."""
    both = [run.ranks[0] for run in (runs.alone, runs.together) if run]
    loops = [loop for rank in both for loop in rank.training_loops[:1] if not loop.may_end_early]
    lengths = [loop.num_batches or 0 for loop in loops]
    if len(lengths) < 2 or not 0 < lengths[1] < 0.75 * lengths[0]:
        return
    steps = [[one for one in rank.steps() if one.loop == loop.number] for rank, loop in zip(both, loops, strict=True)]
    alone, together = map(_fall, steps)
    common = alone.keys() & together.keys()
    is_same = all(math.isclose(alone[number], together[number], rel_tol=1e-6) for number in common)
    if is_same and len({alone[number] for number in common}) > 2:
        yield (
            f"the learning rate falls by steps as on one rank, though an epoch has {lengths[1]} batches in place of "
            f"{lengths[0]} ({steps[1][0].line}); right where training ends after a number of steps, else: count the "
            "schedule's steps by the batches of one rank, or with Accelerate: accelerator.prepare(scheduler)"
        )


def _fall(steps: Sequence[Step]) -> dict[int, float]:
    """Return shares of the highest rate by the numbers of steps, from that rate on until rates rise again."""
    rates = [step.learning_rates[0] for step in steps]
    highest = max(rates)
    begin = rates.index(highest)
    pairs = enumerate(itertools.pairwise(rates[begin:]), begin + 1)
    end = next((index for index, (before, after) in pairs if after > before * (1 + _NEAR)), len(rates))
    return {step.number: step.learning_rates[0] / highest for step in steps[begin:end]} if highest else {}


def _at_equal_epochs(alone: Sequence[Step], together: Sequence[Step]) -> list[tuple[Step, Step]]:
    """Return pairs of the first steps of epochs, if rates change between epochs only."""
    by_epoch = [itertools.groupby(steps, lambda step: step.loop) for steps in (alone, together)]
    firsts = [[next(own) for _, own in epochs] for epochs in by_epoch]
    is_by_epoch = all(
        len({step.learning_rates for step in steps if step.loop == first.loop}) == 1
        for steps, own in zip((alone, together), firsts, strict=True)
        for first in own[:2]
    )
    return list(zip(firsts[1], firsts[0], strict=False)) if is_by_epoch else []


def _at_equal_samples(alone: Sequence[Step], together: Sequence[Step], growth: float) -> list[tuple[Step, Step]]:
    first = [step for step in alone if step.loop == alone[0].loop]
    own = [step for step in together if step.loop == together[0].loop]
    places = [(step, math.ceil(index * growth)) for index, step in enumerate(own)]
    return [(step, first[place]) for step, place in places if place < len(first)]


def _steps(run: Run) -> Sequence[Step]:
    return run.ranks[0].steps() if run.ranks else []


def _near(value: float, target: float) -> bool:
    return abs(value / target - 1) < _NEAR
