"""From two splits to a data set: what is learnt from them, and by how many numbers the network says it.

The targets say what is learnt: whole numbers are classes, fractions the numbers of a regression, and whole numbers in
the shape of the inputs, which are whole numbers as well, the tokens that follow.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.data.datasets.base import Dataset, InputType, Split, Task

MAX_CLASSES = 2**20
"""As --synthetic-classes allows: what is more is no number of a class."""
_SAMPLES_LOOKED_AT = 10_000
"""Of which mean and standard deviation of pixels are taken, at equal distances."""
Scale = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of the channels."""


def describe(train: Split, validation: Split, *, where: str, scale: Scale | None = None) -> Dataset:
    """The data set of two splits.

    Where there are classes, a split has them all in an attribute `targets`, or says their number in `num_classes`.

    Args:
        where: the data set's name, for messages.
        scale: by which pixels are normalised; by their own where not given.

    Raises:
        UserError: a split has no samples, or samples that are not as those of the other, or nothing can be learnt.
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
    """Inputs and targets of the first sample, as a batch of one."""
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
    """Of labels, or of tokens."""
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
    """One more than the largest token; 0 where splits neither say it nor have all of them, or where one is negative."""
    if (given := getattr(splits[0], "num_tokens", None)) is not None:
        return given
    tokens = [array for split in splits if (array := getattr(split, "inputs", None)) is not None]
    is_known = len(tokens) == len(splits) and all(array.min() >= 0 for array in tokens)
    return 1 + max(int(array.max()) for array in tokens) if is_known else 0


def _scale(split: Split) -> Scale:
    """Of each channel's pixels, in 0..1; of all numbers where they are no images."""
    chosen = np.linspace(0, len(split) - 1, min(len(split), _SAMPLES_LOOKED_AT)).astype(np.int64)
    pixels, _ = split.read(chosen, epoch=0)
    axes = tuple(range(pixels.ndim - 1)) if pixels.ndim == 4 else None
    mean, std = (np.atleast_1d(value) / 255 for value in (pixels.mean(axes), pixels.std(axes)))
    return tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist())
