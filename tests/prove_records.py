"""Made-up records of two ranks that train correctly, for tests that change them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from allstep.commands.prove.checks import findings
from allstep.commands.prove.observer.values import projections
from allstep.commands.prove.rank import Rank
from allstep.commands.prove.records import Ended, Forward, Gradient, Loop, Started, Step, World
from allstep.commands.prove.runs import Run, Runs

GRADIENTS = np.random.default_rng(0).normal(size=(2, 3, 50))  # rank, step, value
STEP = Step(1, 1, 1, "SGD", True, (0.1,), (), {"w": "00"}, {}, 1.0, "cpu", "train.py:9")


def run(factor: float = 1.0, *, size: int = 2, rate: float = 0.2, device: str = "cpu") -> Run:
    """Return ranks that train correctly, except for the factor of the mean gradient that they apply."""
    ranks = []
    for number in range(size):
        records = [Started(number, number), World("horovod", number, size, ""), Loop(1, "train.py:5", 3)]
        for step in range(3):
            own, mean = GRADIENTS[number, step], GRADIENTS[:size, step].mean(0)
            gradient = Gradient("w", projections(own), projections(factor * mean))
            rows = tuple(f"{number} {step} {row}" for row in range(4))
            records.append(Forward(step + 1, 1, True, rows, None, {}, None, "train.py:7"))
            weights = {"w": "00"} if step == 0 else {}
            one = replace(STEP, number=step + 1, gradients=(gradient,), learning_rates=(rate,), weights=weights)
            records.append(replace(one, device=device))
        ranks.append(Rank((*records, Ended("script", ""))))
    return Run(size, tuple(ranks), {})


ALONE = run(size=1, rate=0.1)


def names(together: Run) -> list[str]:
    return [finding.name for finding in findings(Runs(ALONE, together))]


def with_more(*more: object) -> Run:
    """Return the correct run in which each rank has these additional records before its end."""
    right = run()
    return replace(right, ranks=tuple(Rank((*rank.records[:-1], *more, rank.records[-1])) for rank in right.ranks))


def map_steps(right: Run, change) -> Run:
    """Return a run in which `change(rank, step)` returns other fields of each step."""
    ranks = [
        Rank(tuple(replace(one, **change(rank.number, one)) if isinstance(one, Step) else one for one in rank.records))
        for rank in right.ranks
    ]
    return replace(right, ranks=tuple(ranks))
