"""Task inference: builds a data set from two splits by deriving the task and the number of outputs.

The targets determine the task: one integer per sample is a class, floats are the values of a regression, and integers
in the shape of integer inputs are the tokens that follow.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.data.datasets.base import Dataset, InputType, Split, Task

MAX_CLASSES = 2**20
"""Maximum number of classes, as for --synthetic-classes; a larger integer target is taken for a mistake."""
_SAMPLES_LOOKED_AT = 10_000
"""Number of equally spaced samples from which mean and standard deviation of pixels are estimated."""
Scale = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of the channels."""


def describe(train: Split, validation: Split, *, where: str, scale: Scale | None = None) -> Dataset:
    """Build a data set from two splits.

    In a classification, a split needs an attribute `targets` with all classes, or `num_classes` with their number.

    Args:
        where: name of the data set in error messages.
        scale: mean and standard deviation for normalizing pixels; estimated from the samples if not given.

    Raises:
        UserError: a split has no samples, the splits differ in shapes or types, or the targets fit no task.
    """
    (inputs, targets), others = _first(train, where), _first(validation, where)
    for name, one, other in zip(("inputs", "targets"), (inputs, targets), others, strict=True):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            raise UserError(
                f"expected {name} of one shape and type in both parts of {where}, received {one.dtype} {one.shape[1:]} "
                f"to train and {other.dtype} {other.shape[1:]} to validate; make them alike"
            )
    task = _task(inputs, targets, where)
    num_classes = targets.shape[1] if task == "regression" else _num_classes((train, validation), task, where)
    if task == "next-token":
        num_tokens = num_classes
    else:
        num_tokens = _num_tokens((train, validation)) if inputs.dtype == np.int64 else 0
    if scale is None:
        scale = _scale(train) if inputs.dtype == np.uint8 else ((0.0,), (1.0,))
    return Dataset(
        train=train,
        validation=validation,
        input_shape=inputs.shape[1:],
        num_classes=num_classes,
        mean=scale[0],
        std=scale[1],
        input_type=cast(InputType, str(inputs.dtype)),
        num_tokens=num_tokens,
        task=task,
    )


def _first(split: Split, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets of the first sample, as a batch of one."""
    if not len(split):
        raise UserError(f"expected at least 1 sample in {where}, received none; add samples")
    return split.read(np.zeros(1, np.int64), epoch=0)


def _task(inputs: np.ndarray, targets: np.ndarray, where: str) -> Task:
    if targets.dtype == np.float32:
        return "regression"
    if targets.ndim == 1:
        return "classification"
    if inputs.dtype == np.int64 and targets.shape == inputs.shape:
        return "next-token"
    raise UserError(
        f"expected a whole number (a class), fractions, or as many tokens as in the inputs for each sample of {where}, "
        f"received {targets.dtype} {targets.shape[1:]}; give one of them"
    )


def _num_classes(splits: tuple[Split, Split], task: Task, where: str) -> int:
    """Return the number of classes, or of tokens if the task is next-token."""
    given = getattr(splits[0], "num_classes", None)
    names = ("targets", "inputs") if task == "next-token" else ("targets",)
    labels = [array for name in names for split in splits if (array := getattr(split, name, None)) is not None]
    if given is None and not labels:
        raise UserError(
            f"expected {where} to say how many classes it has, received nothing; give the object num_classes, a whole "
            "number, or targets, an array of all of them"
        )
    maximum = MAX_CLASSES if given is None else given
    lowest = min((int(array.min()) for array in labels), default=0)
    highest = max((int(array.max()) for array in labels), default=0)
    if lowest < 0 or highest >= maximum:
        raise UserError(
            f"expected labels from 0 to {maximum - 1} in {where}, received {lowest if lowest < 0 else highest}; number "
            "the classes from 0"
        )
    return highest + 1 if given is None else given


def _num_tokens(splits: tuple[Split, Split]) -> int:
    """Return the size of the vocabulary, or 0 if it is not declared and the tokens are unavailable or negative."""
    if (given := getattr(splits[0], "num_tokens", None)) is not None:
        return given
    tokens = [array for split in splits if (array := getattr(split, "inputs", None)) is not None]
    is_known = len(tokens) == len(splits) and all(array.min() >= 0 for array in tokens)
    return 1 + max(int(array.max()) for array in tokens) if is_known else 0


def _scale(split: Split) -> Scale:
    """Estimate mean and standard deviation per channel, or of all numbers if they are no images, scaled to 0..1."""
    chosen = np.linspace(0, len(split) - 1, min(len(split), _SAMPLES_LOOKED_AT)).astype(np.int64)
    pixels, _ = split.read(chosen, epoch=0)
    axes = tuple(range(pixels.ndim - 1)) if pixels.ndim == 4 else None
    mean, std = (np.atleast_1d(value) / 255 for value in (pixels.mean(axes), pixels.std(axes)))
    return tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist())
