"""What a checkpoint holds, and whether it fits a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.files.schema import brief

# Every array's name starts with one of these, and each has a file of its own in a checkpoint.
GROUPS = ("model", "optimizer", "ema")
OPTIONAL_GROUPS = ("ema",)  # whose file is there where they have arrays
FRAMEWORKS = ("pytorch", "tensorflow")
# What workers export, whatever they compute in. Anything else would be cast on its way into a network.
DTYPE = np.dtype(np.float32)


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
    # "optimizer/NAME/SLOT": optimizer slots in the layout of their weight, or one number for it;
    # "ema/NAME": moving averages of weights, in their layout
    progress: Progress
    rng: dict[str, Any] = field(default_factory=dict)  # states of the random number generators
    schedule: dict[str, Any] = field(default_factory=dict)  # settings and state of the learning rate
    config: dict[str, Any] = field(default_factory=dict)  # the resolved configuration
    versions: dict[str, str] = field(default_factory=dict)  # packages by name; with --slices also threads and processor


def check_compatible(expected: Mapping[str, tuple[int, ...]], arrays: Mapping[str, np.ndarray]) -> None:
    """Checks that a checkpoint's arrays are those of the model (and optimizer) at hand.

    `expected` maps each name to its shape.

    Raises:
        UserError: names the first array, in the order of `expected`, that is missing, has another shape or type, or
            holds what it cannot; failing that, the first array that nobody expects.
    """
    advice = "use the model and optimizer it was written for"
    for name, shape in expected.items():
        if name not in arrays:
            raise UserError(f"checkpoint does not fit: expected {name} {tuple(shape)}, received none; {advice}")
        array, misfit = arrays[name], f"checkpoint does not fit: expected {name}"
        if array.shape != tuple(shape):
            raise UserError(f"{misfit} {tuple(shape)}, received {array.shape}; {advice}")
        if array.dtype != DTYPE:
            raise UserError(
                f"{misfit} in {DTYPE}, as trainers write it, received {array.dtype}; take another checkpoint"
            )
        if name.endswith(_NEVER_NEGATIVE) and (array < 0).any():
            raise UserError(
                f"expected {name} of the checkpoint to be 0 or more, as squares are, received {array.min():g}; it is "
                "damaged: take another checkpoint"
            )
    for name, array in arrays.items():
        if name not in expected:
            raise UserError(
                f"checkpoint does not fit: expected no {brief(name)}, received one of shape {array.shape}; {advice}"
            )


# Means of squares, whose root is taken.
_NEVER_NEGATIVE = (".running_var", "/exp_avg_sq", "/layer_exp_avg_sq", "/square_avg", "/sum_of_squares")
