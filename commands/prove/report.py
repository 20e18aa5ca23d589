"""What a user reads in the end: findings, what they rest on, and what was not looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from allstep.commands.prove.checks import perhaps
from allstep.commands.prove.findings import Finding
from allstep.commands.prove.launching import Script
from allstep.commands.prove.records import Loop
from allstep.commands.prove.runs import Runs


def report(script: Script, runs: Runs, found: Sequence[Finding]) -> str:
    """The whole text."""
    run = runs.together
    num_steps = min(len(rank.steps()) for rank in run.ranks)
    lines = [f"{script.path}: {num_steps} steps on {len(run.ranks)} ranks ({script.launcher})"]
    if runs.alone:
        lines[0] += f", {len(runs.alone.ranks[0].steps())} on 1"
    if run.failure:
        lines.append(f"then it failed: {run.failure}")
    lines += [f"{number}. {finding}" for number, finding in enumerate(found, 1)]
    if not found:
        lines.append(f"in step, as far as {num_steps} steps show")
    lines += [f"perhaps: {text}" for text in perhaps(runs, found)]
    lines += [f"not looked at: {text}" for text in _not_looked_at(runs)]
    return "\n".join(lines)


def _not_looked_at(runs: Runs) -> Iterator[str]:
    rank = runs.together.ranks[0]
    if runs.alone is None:
        yield "learning rate and loss beside one rank's, as the script starts its ranks itself"
    if runs.together.uses_adasum:
        yield "gradients and learning rate, for Adasum makes no mean, and asks for no scaling"
    if len({step.loop for step in rank.steps()}) < 2 or not rank.all(Loop):
        yield "a second epoch"
    if not rank.forwards(training=True):
        yield "samples, for no model that the hooks know was called in training"
    if not rank.forwards(training=False):
        yield "validation"
    elif rank.library == "tf.distribute":
        yield "whether the results of validation are brought together: metrics of a strategy's scope are"
    if rank.library == "tf.distribute":
        yield "dropout, for which Keras gives all replicas the same random state"
    if rank.ended and rank.ended.reason == "steps":
        yield f"what the script does after step {len(rank.steps())}, such as files that it writes at its end"
    if all(step.device == "cpu" for step in rank.steps()):
        yield "GPUs, for the ranks computed on CPUs"
