"""Does the learning rate follow the global batch, by Goyal et al. (2017) linearly for SGD?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from allstep.commands.prove.checks.samples import batches
from allstep.commands.prove.findings import Finding
from allstep.commands.prove.records import Step
from allstep.commands.prove.runs import Run, Runs

_NEAR = 0.05
_LINEAR = ("SGD", "LARS", "Momentum")
"""Optimizers whose rate is scaled linearly; others are often left as they are, or scaled by the root."""


def check(runs: Runs) -> Iterator[Finding]:
    """Compare the learning rates on one rank and on several with the global batches there."""
    if runs.alone is None or runs.together.uses_adasum:  # which asks for no scaling
        return
    alone, together = _first_steps(runs.alone), _first_steps(runs.together)
    batch_alone, batch_together = _global_batch(runs.alone), _global_batch(runs.together)
    if not (alone and together and batch_alone and batch_together and alone[0].learning_rates[:1]):
        return
    rate, scaled = alone[0].learning_rates[0], together[0].learning_rates[0]
    if not rate or _rises(together):  # a warm-up, whose end is not seen
        return
    growth, ratio = batch_together / batch_alone, scaled / rate
    evidence = (
        f"the learning rate is {rate:.3g} on one rank and {scaled:.3g} on {runs.together.num_ranks}, the global batch "
        f"{batch_alone} and {batch_together} samples"
    )
    is_linear = any(name in together[0].kind for name in _LINEAR)
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


def _first_steps(run: Run) -> Sequence[Step]:
    steps = run.ranks[0].steps() if run.ranks else []
    return [step for step in steps if step.loop == steps[0].loop]


def _global_batch(run: Run) -> int:
    """Samples of the first step over all ranks."""
    return sum(len(batches(rank.forwards(training=True)).get(1, ())) for rank in run.ranks)


def _rises(steps: Sequence[Step]) -> bool:
    rates = [step.learning_rates[0] for step in steps]
    return len(rates) > 2 and all(later > earlier for earlier, later in zip(rates, rates[1:], strict=False))


def _near(value: float, target: float) -> bool:
    return abs(value / target - 1) < _NEAR
