"""Losses and weights over a run, and how far those of two runs differ, for `allstep parity` and others.

The difference of two losses a and b is |a - b| / |a|. The difference of two sets of weights is the largest over all
tensors of max |a - b| / max |a|, the maxima being over the elements of a tensor.
"""

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
    """Losses and weights over the steps of a run."""

    losses: Mapping[int, float]
    """Loss of every step, from step 1."""
    weights: Mapping[int, Mapping[str, np.ndarray]]
    """Weights by canonical name, after some of the steps."""


@dataclass(frozen=True)
class Difference:
    """How far two curves differ at a step."""

    loss: float
    """Largest difference of losses since the previous step with known weights."""
    weights: float


def read_curve(output_dir: Path, num_steps: int) -> Curve:
    """Read the first `num_steps` steps of a run from its metrics.jsonl and its checkpoints."""
    losses = {event.step: event.loss for event in read_events(output_dir / FILE).steps if event.step <= num_steps}
    states = (load(path, output_dir, warn=print) for path in sorted((output_dir / "checkpoints").glob("step-*")))
    return Curve(losses, {one.progress.step: weights_of(one) for one in states if one.progress.step <= num_steps})


def weights_of(state: TrainState) -> dict[str, np.ndarray]:
    """Return the weights in a checkpoint, without the optimizer's state."""
    return {name: array for name, array in state.arrays.items() if name.startswith("model/")}


def apart(reference: Curve, other: Curve) -> dict[int, Difference]:
    """Return how far two curves differ at each step whose weights are known."""
    losses = {step: abs(loss - other.losses[step]) / abs(loss) for step, loss in reference.losses.items()}
    differences, before = {}, 0
    for step, weights in reference.weights.items():
        since = [losses[number] for number in range(before + 1, step + 1)]
        differences[step] = Difference(float(np.max(since)), weights_apart(weights, other.weights[step]))
        before = step
    return differences


def weights_apart(reference: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> float:
    """Return the difference of two sets of weights; 0 if they are equal.

    Raises Fault if the names or shapes of the tensors differ.
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
    """Return the largest differences of several comparisons at each step."""
    return {step: largest_of([one[step] for one in comparisons]) for step in comparisons[0]}


def largest_of(differences: Iterable[Difference]) -> Difference:
    """Return the largest difference of losses and the largest difference of weights."""
    # np.max, unlike max, propagates NaN.
    losses, weights = zip(*((one.loss, one.weights) for one in differences), strict=True)
    return Difference(float(np.max(losses)), float(np.max(weights)))
