"""Content of a checkpoint, and the check that it fits a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.files.strict_json import Mismatch, Whole, brief

# Every array's name starts with one of these groups, and each group has a file in a checkpoint.
GROUPS = ("model", "optimizer", "ema")
CONSTANTS = "constants"  # file of the arrays of the network that are not finite; all others are
FILES = (*GROUPS, CONSTANTS)
OPTIONAL_FILES = ("ema", CONSTANTS)  # they exist only if they have arrays
# Type that workers export, whatever they compute in. Any other would be cast when it is loaded into a network.
DTYPE = np.dtype(np.float32)


class ArrayShape(tuple[int, ...]):
    """The shape of an array of a checkpoint, with what else is expected of the array."""

    dtype: np.dtype
    optional: bool
    finite: bool
    any_length: bool

    def __new__(
        cls,
        shape: Iterable[int],
        *,
        dtype: np.dtype = DTYPE,
        optional: bool = False,
        finite: bool = True,
        any_length: bool = False,
    ) -> ArrayShape:
        """Describe an array.

        Args:
            optional: whether a run may not have it yet.
            finite: whether nan and infinity in it mean that training has failed; constants may have them.
            any_length: whether its axes may have any length.
        """
        self = super().__new__(cls, shape)
        self.dtype, self.optional, self.finite, self.any_length = dtype, optional, finite, any_length
        return self


def described(shape: tuple[int, ...]) -> ArrayShape:
    """Return a shape as an `ArrayShape`: if it is not one, of an array that needs no more than the shape."""
    return shape if isinstance(shape, ArrayShape) else ArrayShape(shape)


def _number(value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Mismatch(f"expected {where} to be a number, received {brief(value)}")


@dataclass(frozen=True)
class Progress:
    """Progress of the run, sufficient to resume in mid-epoch on any number of ranks."""

    CLOSED: ClassVar[bool] = True

    epoch: Whole  # completed epochs
    offset: Whole  # samples of the current epoch that all ranks together have already seen
    step: Whole  # optimizer steps since the start, which name the checkpoint
    samples_seen: Whole  # samples since the start, in which the schedule counts
    running: dict[str, Annotated[Any, _number]] = field(default_factory=dict)
    # numbers that a resumed run continues: the sums of the current epoch, cumulative seconds, best metric, ...


@dataclass(frozen=True)
class TrainState:
    """State from which a run can resume.

    All fields but `arrays` must consist of JSON types (str keys, no tuples); non-finite floats are kept.
    """

    framework: str  # the one that wrote it: "pytorch" or "tensorflow"
    arrays: dict[str, np.ndarray]
    # "model/NAME": weights in the canonical layout that both frameworks share;
    # "optimizer/NAME/SLOT": optimizer slots in the layout of their weight, or one number for it;
    # "ema/NAME": moving averages of weights, in their layout
    progress: Progress
    rng: dict[str, Any] = field(default_factory=dict)  # states of the random number generators
    schedule: dict[str, Any] = field(default_factory=dict)  # settings and state of the learning rate
    config: dict[str, Any] = field(default_factory=dict)  # the resolved configuration
    versions: dict[str, str] = field(default_factory=dict)  # packages by name; with --slices also threads and processor
    data: dict[str, str] = field(default_factory=dict)  # digests of the data set; none in format 1
    description: dict[str, Any] = field(default_factory=dict)  # what the run was trained on; none before format 3


def content_of(source: Any) -> dict[str, Any]:
    """Return what a state and its manifest have in common, which is all of a state but its arrays."""
    return {item.name: getattr(source, item.name) for item in fields(TrainState) if item.name != "arrays"}


def check_compatible(expected: Mapping[str, tuple[int, ...]], arrays: Mapping[str, np.ndarray]) -> None:
    """Check that a checkpoint's arrays fit the model and optimizer, whose names and shapes are `expected`.

    A shape is a tuple or an `ArrayShape`. Raises UserError if an array is missing, has another shape or type, or
    invalid values, or is not expected. The message names the first one in the order of `expected`, or else the first
    unexpected one.
    """
    advice = "use the model and optimizer it was written for"
    for name, shape in expected.items():
        shape = described(shape)
        if name not in arrays and shape.optional:
            continue
        if name not in arrays:
            group, _, own = name.partition("/")
            similar = (other for other in arrays if other.startswith(f"{group}/") and other.endswith(f".{own}"))
            if prefixed := next(similar, None):  # by module. of DistributedDataParallel, or _orig_mod. of torch.compile
                advice = f"rename {brief(prefixed)} and the like, without what their names begin with"
            raise UserError(f"checkpoint does not fit: expected {name} {tuple(shape)}, received none; {advice}")
        array, misfit = arrays[name], f"checkpoint does not fit: expected {name}"
        if array.shape != tuple(shape) and not (shape.any_length and array.ndim == len(shape)):
            raise UserError(f"{misfit} {tuple(shape)}, received {array.shape}; {advice}")
        if array.dtype != shape.dtype:
            raise UserError(
                f"{misfit} in {shape.dtype}, as trainers write it, received {array.dtype}; take another checkpoint"
            )
        if shape.finite and not np.isfinite(array).all():
            raise UserError(
                f"expected finite numbers in {name} of the checkpoint, received nan or inf; it is damaged: take "
                "another one"
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


# Means or sums of squares, of which the square root is taken.
_NEVER_NEGATIVE = (".running_var", "/exp_avg_sq", "/layer_exp_avg_sq", "/square_avg", "/sum_of_squares")
