"""What a checkpoint holds, and whether it fits a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from allstep.common.errors import UserError

# Every array's name starts with one of these, and each has a file of its own in a checkpoint.
GROUPS = ("model", "optimizer")


@dataclass(frozen=True)
class Progress:
    """Where training stood: enough to go on in mid-epoch, on any number of ranks."""

    epoch: int  # epochs completed
    offset: int  # samples of the running epoch already seen, by all ranks together
    step: int  # optimizer steps since the start; names the checkpoint
    samples_seen: int  # samples since the start: what the schedule counts in
    running: dict[str, int | float] = field(default_factory=dict)
    # numbers carried across a resume: the sums of the running epoch, cumulative seconds, best metric, ...


@dataclass(frozen=True)
class TrainState:
    """Everything a run needs to go on. All but `arrays` must be what JSON can hold (str keys, no tuples);
    non-finite floats are kept."""

    framework: str  # who wrote it: "pytorch" or "tensorflow"
    arrays: dict[str, np.ndarray]
    # "model/NAME": weights in the canonical layout that both frameworks share;
    # "optimizer/NAME/SLOT": optimizer slots in the layout of their weight
    progress: Progress
    rng: dict[str, Any] = field(default_factory=dict)  # states of the random number generators
    schedule: dict[str, Any] = field(default_factory=dict)  # settings and state of the learning rate
    config: dict[str, Any] = field(default_factory=dict)  # the resolved configuration
    versions: dict[str, str] = field(default_factory=dict)  # packages by name


def check_compatible(expected: Mapping[str, tuple[int, ...]], arrays: Mapping[str, np.ndarray]) -> None:
    """Checks that a checkpoint's arrays are those of the model (and optimizer) at hand.

    `expected` maps each name to its shape.

    Raises:
        UserError: names the first array, in the order of `expected`, that is missing or has another
            shape; failing that, the first array that nobody expects.
    """
    advice = "use the model and optimizer it was written for"
    for name, shape in expected.items():
        if name not in arrays:
            raise UserError(f"checkpoint does not fit: expected {name} {tuple(shape)}, received none; {advice}")
        if arrays[name].shape != tuple(shape):
            received = arrays[name].shape
            raise UserError(f"checkpoint does not fit: expected {name} {tuple(shape)}, received {received}; {advice}")
    for name, array in arrays.items():
        if name not in expected:
            raise UserError(f"checkpoint does not fit: {name} {array.shape} was not expected; {advice}")
