"""Metrics of a user's own: some that work, and one of each mistake."""

from __future__ import annotations

import numpy as np


class Worst:
    """Share of wrong samples of class 0, where lower is better."""

    lower_is_better = True

    def update(self, outputs, targets):
        zeros = targets == 0
        return {"wrong": (outputs.argmax(1)[zeros] != 0).sum(), "all": zeros.sum()}

    def compute(self, counts):
        return counts["wrong"] / max(counts["all"], 1)


class Spread:
    """Mean of the outputs of each class."""

    def update(self, outputs, targets):
        return np.stack([outputs.sum(0), np.full(outputs.shape[1], float(len(outputs)))])

    def compute(self, counts):
        return counts[0] / counts[1]


worst = Worst()
number = 3


class Wrong:
    """A metric whose counts are what its function returns."""

    def __init__(self, counts, value=0.0):
        self.update, self.compute = (lambda outputs, targets: counts(targets)), (lambda _: value)


def _raise(targets):
    raise ValueError("bad")


raises = Wrong(_raise)
text = Wrong(lambda targets: np.array(["a"]))
grows = Wrong(lambda targets: np.zeros(len(targets)))
says = Wrong(len, "much")


class PerClass:
    """Number of samples of each class, by the name of the class, all in some batches only."""

    def update(self, outputs, targets):
        return {f"class {label}": int((targets == label).sum()) for label in np.unique(targets)}

    def compute(self, counts):
        return [np.sum(list(counts.values()))]


class Mean(Worst):
    def update(self, outputs, targets):
        return {"wrong": (outputs.argmax(1) != targets).mean(), "all": 1}


class Largest(Worst):
    def update(self, outputs, targets):
        return {"wrong": outputs.max(), "all": len(targets)}


class Remembers(Worst):
    """Keeps its counts to itself."""

    seen = 0

    def update(self, outputs, targets):
        self.seen += len(targets)
        return {}

    def compute(self, counts):
        return self.seen


class Spoils(Worst):
    """Counts all samples as class 1, in the arrays that it gets."""

    def update(self, outputs, targets):
        outputs[:], targets[:] = 0, 1
        return {"wrong": 0, "all": len(targets)}


class Listed(Worst):
    def compute(self, counts):
        return [counts["wrong"], counts["all"]]
