"""Task inference: builds a data set from two splits by deriving the task and the number of outputs.

The targets determine the task, as `labels` says.
"""

from typing import Any, cast

import numpy as np

from allstep.common.base.errors import UserError, quote
from allstep.common.data.datasets.base import Dataset, InputType, Split, Task
from allstep.common.data.formats.arrays import check_channels_last
from allstep.common.data.formats.labels import Meaning, meaning_of, tell_of_many
from allstep.common.data.passed_over import tell

MAX_CLASSES = 2**20
"""Maximum number of classes, as for --synthetic-classes; a larger integer target is taken for a mistake."""
_MAX_OUTPUTS_A_CLASS = 10
"""Outputs for each class that occurs, above which a line says that the labels have gaps."""
_TARGETS_LOOKED_AT = 16
"""Number of samples read to find out what targets mean, if a user's object does not have all targets."""
_SAMPLES_LOOKED_AT = 10_000
"""Number of equally spaced samples from which mean and standard deviation of pixels are estimated."""
Scale = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of the channels."""


def describe(train: Split, validation: Split, *, where: str, task: str = "auto", scale: Scale | None = None) -> Dataset:
    """Build a data set from two splits, whose targets are replaced by what they mean (see `labels`).

    In a classification, a split needs an attribute `targets` with all classes, or `num_classes` with their number.
    Raises UserError if a split has no samples, the splits differ in shapes or types, or the targets fit no task.

    Args:
        where: name of the data set in error messages.
        task: `DataConfig.task`.
        scale: mean and standard deviation for normalizing pixels; estimated from the samples if not given.
    """
    (inputs, targets), others = _first(train, where), _first(validation, where)
    for name, one, other in zip(("inputs", "targets"), (inputs, targets), others, strict=True):
        if (one.shape, one.dtype.kind) != (other.shape, other.dtype.kind):
            raise UserError(
                f"expected {name} of one shape and type in both parts of {where}, received {one.dtype} {one.shape[1:]} "
                f"to train and {other.dtype} {other.shape[1:]} to validate; make them alike"
            )
    if inputs.dtype != np.int64 and inputs.dtype != object:
        check_channels_last(inputs.shape[1:], f"the inputs of {where}")
    tokens = inputs.dtype == np.int64
    seen = [_targets_seen(split, first, where) for split, first in ((train, targets), (validation, others[1]))]
    seen = list({id(array): array for array in seen}.values())  # of which a share is held out, it is the same array
    for what in ("fields", "class_names"):
        one, other = (tuple(getattr(split, what, None) or ()) for split in (train, validation))
        if one[: len(other)] != other[: len(one)]:
            raise UserError(
                f"expected the same {what.replace('_', ' ')} in both parts of {where}, received "
                f"{quote(', '.join(one))} to train and {quote(', '.join(other))} to validate; make them alike"
            )
    tokens_follow = tokens and targets.shape == inputs.shape
    known = tuple(getattr(train, "class_names", None) or ())
    meaning = meaning_of(seen, task=task, tokens=tokens_follow, where=where, known=known)
    for base in {id(base): base for base in (getattr(split, "whole", split) for split in (train, validation))}.values():
        _relabel(base, meaning)
    task = meaning.task
    num_classes = meaning.num_classes if meaning.names or getattr(train, "num_classes", None) is None else None
    if task == "regression":
        num_classes = meaning.convert(targets).shape[1]
    elif num_classes is None:
        num_classes = _num_classes((train, validation), task, where)
    for split in (train, validation):
        base: Any = getattr(split, "whole", split)
        if task == "classification" and hasattr(base, "convert"):  # labels that are read are below it
            base.num_classes = num_classes
    num_tokens = num_classes if task == "next-token" else _num_tokens((train, validation)) if tokens else 0
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
        class_names=meaning.names or known,
        fields=tuple(getattr(train, "fields", None) or ()),
    )


def _first(split: Split, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets of the first sample, as a batch of one."""
    if not len(split):
        raise UserError(f"expected at least 1 sample in {where}, received none; add samples")
    return split.read(np.zeros(1, np.int64), epoch=0)


def _targets_seen(split: Split, first: np.ndarray, where: str) -> np.ndarray:
    """Return all targets of a split, or those of some samples if it does not have them at hand."""
    if (targets := getattr(split, "targets", None)) is not None:
        return targets
    if first.dtype.kind == "i" and first.ndim == 1:  # class numbers, whatever the others are
        return first
    if first.dtype.kind == "U" and not getattr(split, "class_names", None):
        raise UserError(
            f"expected {where} to say which names its targets have; give the object targets, or class_names"
        )
    return split.read(np.linspace(0, len(split) - 1, min(len(split), _TARGETS_LOOKED_AT)).astype(np.int64), epoch=0)[1]


def _relabel(split: Any, meaning: Meaning) -> None:
    """Replace the targets of a split by what they mean."""
    if hasattr(split, "convert"):
        split.convert = meaning.convert
    if getattr(split, "targets", None) is not None:
        split.targets = meaning.convert(split.targets)


def _num_classes(splits: tuple[Split, Split], task: Task, where: str) -> int:
    """Return the number of classes, or of tokens if the task is next-token."""
    given = getattr(splits[0], "num_classes", None)
    if given is None and task == "classification":
        given = len(getattr(splits[0], "class_names", None) or ()) or None
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
    if given is None and task == "classification":
        distinct = np.count_nonzero(sum(np.bincount(array, minlength=highest + 1) for array in labels))
        if highest + 1 > _MAX_OUTPUTS_A_CLASS * distinct:
            tell(
                f"the labels of {where} go up to {highest}, so the network has {highest + 1} outputs, but only "
                f"{distinct} different labels occur; number the classes from 0 without gaps"
            )
        tell_of_many(int(distinct), sum(map(len, labels)), where)
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
