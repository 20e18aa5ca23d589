"""Report of `allstep prove`: what was found, what may be wrong, and what was not looked at, each list complete."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import numpy as np

from allstep.commands.prove.checks import perhaps
from allstep.commands.prove.checks.carrying import compares_ranks, may_compare_own
from allstep.commands.prove.checks.factors import factors_of, gradient_ratio
from allstep.commands.prove.checks.rates import follows_losses, warms_up
from allstep.commands.prove.checks.weights import has_shards
from allstep.commands.prove.findings import Finding, listed
from allstep.commands.prove.launching import Script
from allstep.commands.prove.rank import Rank
from allstep.commands.prove.records import (
    ADASUM,
    AVERAGES_WEIGHTS,
    BY_LOSSES,
    FOLLOWS_LOSSES,
    Loop,
    LoopEnd,
    Unseen,
    World,
    Yielded,
)
from allstep.commands.prove.runs import Runs


def report(script: Script, runs: Runs, found: Sequence[Finding]) -> str:
    """Return the text of the report."""
    run = runs.together
    num_steps = _num_steps(runs)
    lines = [f"{script.path}: {num_steps} steps on {len(run.ranks)} ranks ({script.launcher})"]
    if runs.alone:
        lines[0] += f", {len(runs.alone.ranks[0].steps())} on 1"
    if run.failure:
        lines.append(f"then it failed: {run.failure}")
    lines.append(f"found: {len(found)}" if found else f"found: nothing; in step, as far as {num_steps} steps show")
    lines += [f"{number}. {finding}" for number, finding in enumerate(found, 1)]
    lines += [f"perhaps: {text}" for text in perhaps(runs, found) or ["nothing"]]
    lines += [f"not looked at: {text}" for text in _not_looked_at(runs)]
    return "\n".join(lines)


def as_json(script: Script, runs: Runs, found: Sequence[Finding]) -> str:
    """Return the report as a JSON object."""
    content = {
        "script": str(script.path),
        "launcher": script.launcher,
        "ranks": len(runs.together.ranks),
        "steps": _num_steps(runs),
        "steps_alone": len(runs.alone.ranks[0].steps()) if runs.alone else None,
        "failure": runs.together.failure or None,
        "found": [asdict(finding) for finding in found],
        "perhaps": perhaps(runs, found),
        "not_looked_at": list(_not_looked_at(runs)),
    }
    return json.dumps(content, indent=2)


def _num_steps(runs: Runs) -> int:
    return min(len(rank.steps()) for rank in runs.together.ranks)


def _not_looked_at(runs: Runs) -> Iterator[str]:
    rank = runs.together.ranks[0]
    yield from _values(runs)
    yield from _epochs(rank)
    if not any(one.rows for one in rank.forwards(training=True)):
        yield "samples and the scale of learning rates, for no call of a model in training shows samples"
    if not rank.forwards(training=False):
        yield "validation"
    elif any(one.by_library for one in rank.forwards(training=False)):
        yield "whether the results of validation are brought together, for a library validates"
    elif rank.library == "tf.distribute":
        yield "whether the results of validation are brought together: metrics of a strategy's scope are"
    if rank.library == "tf.distribute":
        yield "dropout, for which Keras gives all replicas the same random state"
    if any(loop.num_workers for loop in rank.training_loops):
        yield "random numbers of loaders' workers, such as those of augmentation"
    elif not rank.all(Yielded):
        yield "random numbers outside of models, such as those of augmentation"
    text = runs.script.read_text() if runs.script else ""
    if re.search(r"\b(default_rng|Generator|RandomState|Random)\(", text):
        yield "random numbers of generators that the script makes itself"
    if re.search(r"\belastic\b", text):
        yield "what an elastic state restores when ranks are lost or added, such as a sampler's position"
    if rank.library != "tf.distribute":
        yield "tensors that the script keeps in variables from step to step, beside moving averages in PyTorch"
        yield "figures that the script logs in training, which may be those of one rank's samples"
    if all(step.device == "cpu" for step in rank.steps()):
        yield "GPUs, for the ranks computed on CPUs"
    unseen = {FOLLOWS_LOSSES: BY_LOSSES} if follows_losses(runs) else {}
    unseen |= {one.what: one.reason for rank in runs.together.ranks for one in rank.all(Unseen)}
    yield from (f"{what} ({reason})" for what, reason in unseen.items())


def _values(runs: Runs) -> Iterator[str]:
    """Yield what was not compared of gradients, weights and rates."""
    run, rank = runs.together, runs.together.ranks[0]
    optimizers = range(1, run.num_optimizers + 1)
    if any(one.size > run.num_ranks for one in rank.all(World)):
        yield "other groups of ranks, which train models of their own"
    applied = [one.applied for own in run.ranks for step in own.steps() for one in step.gradients if one.applied]
    if applied and not np.any(applied):
        yield "whether gradients are averaged, for all are zero"
    if runs.alone is None:
        yield "learning rate and loss beside one rank's, as the script starts its ranks itself"
    elif warms_up(runs):
        yield "whether the learning rate is scaled, for it rises in all steps seen"
    ratio = gradient_ratio(runs, 1)
    if ratio is None and (factors := factors_of(run, 1)) and np.ptp(factors) > 0.05 * max(factors):
        yield "whether gradients are added up in place of averaged, for their scale varies, as by clipping"
    elif np.any(applied) and not all(factors_of(run, i) or has_shards(run, i) for i in optimizers):
        yield "whether all gradients are averages and no sums, for some are no multiples of those from backward"
    if ratio is None and compares_ranks(runs):
        yield "the scale and the labels of a loss that compares samples of all ranks"
    if may_compare_own(runs):
        yield "whether losses that compare samples with each other have those of all ranks"
    if run.num_optimizers > 1 or any(len(step.learning_rates) > 1 for step in rank.steps()[:1]):
        yield "whether learning rates of further optimizers, and of further groups of weights, are scaled"
    if run.has(ADASUM):
        yield "gradients and learning rate, for Adasum makes no mean, and asks for no scaling"
    if run.has(AVERAGES_WEIGHTS):
        yield "gradients and weights between averages of weights (local SGD)"
    if any(has_shards(run, number) for number in optimizers):
        yield "weights, gradients and states of optimizers to which the script gives shards"
    if run.shares_work:
        yield (
            "samples and the scale of learning rates, for ranks share the work on the same samples (tensor "
            "parallelism, or stages of a pipeline)"
        )
    if any(not step.weights and not step.sharded for step in rank.steps()[1:]):
        yield "weights in some steps"
    yield f"learning rates and weights after step {len(rank.steps())}"


def _epochs(rank: Rank) -> Iterator[str]:
    loops = rank.training_loops
    if len(loops) < 2 or not rank.all(Loop):
        yield "a second epoch"
    cut = {one.loop for one in rank.all(LoopEnd) if one.is_cut}
    ended = {one.loop for one in rank.all(LoopEnd)} - cut
    if loops and not any(loop.number in ended for loop in loops):
        lengths = [loop.num_batches for loop in loops[:1] if loop.num_batches]
        whole = f" of {listed(lengths)} batches" if lengths else ""
        yield f"the end of a whole epoch{whole}, for loops are cut"
    if rank.ended and rank.ended.reason == "steps":
        yield f"what the script does after step {len(rank.steps())}, such as files that it writes at its end"
