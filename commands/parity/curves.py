"""What runs went through, and how far two of them differ: the measures of `allstep parity` and others.

The difference of two losses a and b is |a - b| / |a|. That of two sets of weights is max |a - b| / max |a| over the
elements of a tensor, the largest over all tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from allstep.commands.shared.records.runs import FILE, read_events
from allstep.common.base.errors import Fault
from allstep.common.checkpoint import TrainState, load


@dataclass(frozen=True)
class Curve:
    """What a run went through."""

    losses: Mapping[int, float]
    """Of every step, from 1."""
    weights: Mapping[int, Mapping[str, np.ndarray]]
    """By canonical name, after some of the steps."""


@dataclass(frozen=True)
class Difference:
    """How far two curves differ at a step."""

    loss: float
    """The largest of the steps since the row before."""
    weights: float


def read_curve(output_dir: Path, num_steps: int) -> Curve:
    """The first `num_steps` steps of a run from its metrics.jsonl and its checkpoints."""
    losses = {event.step: event.loss for event in read_events(output_dir / FILE).steps}
    weights = {}
    for path in sorted((output_dir / "checkpoints").glob("step-*")):
        state = load(path, output_dir, warn=print)
        weights[state.progress.step] = weights_of(state)
    return Curve(
        {step: loss for step, loss in losses.items() if step <= num_steps},
        {step: arrays for step, arrays in weights.items() if step <= num_steps},
    )


def weights_of(state: TrainState) -> dict[str, np.ndarray]:
    """The weights in a checkpoint, without what the optimizer remembers."""
    return {name: array for name, array in state.arrays.items() if name.startswith("model/")}


def apart(reference: Curve, other: Curve) -> dict[int, Difference]:
    """How far two curves differ, at each step whose weights are known."""
    losses = {step: abs(loss - other.losses[step]) / abs(loss) for step, loss in reference.losses.items()}
    differences, before = {}, 0
    for step, weights in reference.weights.items():
        since = [losses[number] for number in range(before + 1, step + 1)]
        differences[step] = Difference(float(np.max(since)), weights_apart(weights, other.weights[step]))
        before = step
    return differences


def weights_apart(reference: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> float:
    """max |a - b| / max |a| over the elements of a tensor, the largest over all tensors; 0 for equal ones.

    Raises:
        Fault: the tensors are not the same ones.
    """
    if {name: array.shape for name, array in reference.items()} != {name: array.shape for name, array in other.items()}:
        raise Fault(f"expected the same tensors, received {sorted(reference)} and {sorted(other)}")
    return float(np.max([_tensors_apart(array, other[name]) for name, array in reference.items()]))


def _tensors_apart(reference: np.ndarray, other: np.ndarray) -> float:
    apart, size = np.abs(reference - other).max(), np.abs(reference).max()
    if apart == 0:
        return 0.0
    return float(apart / size) if size else math.inf


def largest(comparisons: Sequence[Mapping[int, Difference]]) -> dict[int, Difference]:
    """The largest differences of several comparisons at each step."""
    return {step: largest_of([one[step] for one in comparisons]) for step in comparisons[0]}


def largest_of(differences: Iterable[Difference]) -> Difference:
    """The largest loss and the largest weights of all."""
    # np.max, unlike max, lets no nan go unseen.
    losses, weights = zip(*((one.loss, one.weights) for one in differences), strict=True)
    return Difference(float(np.max(losses)), float(np.max(weights)))
