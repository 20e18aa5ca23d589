"""Meaning of targets: which task they are for, and how they become what the network trains on.

Class numbers, names of classes and one-hot rows of any type become class numbers. Floating-point targets may be either
classes or numbers: their values decide, a line on stderr says so, and --task decides otherwise.
Map-style data sets may hold labels and names of classes as attributes, which are then known without reading samples.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from allstep.common.base.errors import UserError, quote
from allstep.common.config.data_config import NUMBERS
from allstep.common.data.datasets.base import Task
from allstep.common.data.formats.arrays import plain
from allstep.common.data.passed_over import tell

MAX_NAME_CHARACTERS = 200
"""Maximum length of a class's name; longer text is taken for something else."""
_MIN_SAMPLES_A_CLASS = 2
"""Whole floating-point numbers are classes if all of 0 to the largest occur, this many times on average."""
_SUM_TOLERANCE = 1e-3
_FEW_CLASSES = 20
"""Number of classes up to which no warning follows, however few samples there are."""


@dataclass(frozen=True)
class Meaning:
    """Task of a data set, and the conversion of its targets."""

    task: Task
    convert: Callable[[np.ndarray], np.ndarray] = lambda targets: targets
    """Function from targets as `arrays.targets_of` returns them to those of `Dataset.task`. Raises UserError."""
    num_classes: int | None = None
    """Number of classes, if the targets tell it."""
    names: tuple[str, ...] = ()
    """Names of the classes, if the targets are names."""


def meaning_of(
    targets: Sequence[np.ndarray], *, task: str, tokens: bool, where: str, known: tuple[str, ...] = ()
) -> Meaning:
    """Return the meaning of a data set's targets.

    Raises UserError if the targets fit no task, or not the one that is asked for.

    Args:
        targets: arrays of `arrays.targets_of`: of the training part and perhaps the other one, or of some samples if
            the parts do not have all.
        task: `DataConfig.task`.
        tokens: whether the inputs are tokens, as many as there are targets in a sample.
        known: names of the classes in the order that the data set gives them, if it does.
    """
    first = targets[0]
    if first.dtype.kind == "U":
        return _names(targets, task, where, known)
    if first.dtype.kind == "i":
        return _whole_numbers(targets, task, tokens, where)
    return _fractions(targets, task, where)


def _names(targets: Sequence[np.ndarray], task: str, where: str, known: tuple[str, ...]) -> Meaning:
    if task == "regression" or targets[0].ndim > 1:
        raise UserError(
            f"expected numbers as the targets of {where}, received text such as {quote(targets[0].ravel()[0])}; give "
            "numbers, or one name of a class for each sample"
        )
    for array in targets:
        check_name(array.dtype.itemsize // 4, where)
    names = np.unique(np.concatenate([np.unique(array) for array in targets]))
    tell_of_many(len(names), sum(map(len, targets)), where)
    if {*names.tolist()} <= {*known}:
        names = np.array(known)
    order = np.argsort(names)

    def convert(labels: np.ndarray) -> np.ndarray:
        numbers = order[np.searchsorted(names, labels, sorter=order) % len(names)]
        if (odd := labels[names[numbers] != labels]).size:
            raise _no_classes(where, f"{quote(odd[0])}, which is none of their names")
        return numbers.astype(np.int64)

    return Meaning("classification", convert, len(names), tuple(names.tolist()))


def check_name(num_characters: int, where: str) -> None:
    """Refuse a text that is too long for the name of a class."""
    if num_characters > MAX_NAME_CHARACTERS:
        raise UserError(
            f"expected names of classes of at most {MAX_NAME_CHARACTERS} characters as the targets of {where}, "
            f"received {num_characters}; name another field"
        )


def tell_of_many(num_classes: int, num_samples: int, where: str) -> None:
    """Warn of more classes than half the samples, as ages, prices or captions make."""
    if num_classes > max(_FEW_CLASSES, num_samples / 2):
        tell(f"the {num_samples} targets of {where} are {num_classes} classes; numbers need --task regression")


def _whole_numbers(targets: Sequence[np.ndarray], task: str, tokens: bool, where: str) -> Meaning:
    first = targets[0]
    if task == "regression":
        return Meaning("regression", lambda array: array.reshape(len(array), -1).astype(np.float32))
    if first.ndim == 1:
        return Meaning("classification")
    if tokens and task == "auto":
        return Meaning("next-token")
    if first.ndim == 2 and all(map(_is_one_hot, targets)):
        return _one_hot(first.shape[1], where)
    raise UserError(
        f"expected a whole number (a class), fractions, or as many tokens as in the inputs for each sample of {where}, "
        f"received {first.dtype} {first.shape[1:]}; give one of them, or --task regression for numbers"
    )


def _fractions(targets: Sequence[np.ndarray], task: str, where: str) -> Meaning:
    numbers, width = Meaning("regression"), targets[0].shape[1]
    if task in ("regression", NUMBERS):
        return numbers
    if width > 1:
        if all(map(_is_one_hot, targets)):
            if task == "auto":
                tell(f"the targets of {where} are one-hot rows: trained as {width} classes, unless --task regression")
            return _one_hot(width, where)
        if task == "classification":
            raise _no_classes(where, f"rows of {width} numbers that are not one-hot")
        if all(((array == 0) | (array == 1)).all() for array in targets):
            tell(f"the targets of {where} are rows of 0 and 1: trained as numbers; --loss bce for several labels")
        elif all(map(_are_shares, targets)):
            tell(f"the targets of {where} are rows that add up to 1: trained as numbers, not as shares of classes")
        return numbers
    values = np.unique(np.concatenate([np.unique(array) for array in targets]))
    if (values != np.floor(values)).any():
        if task == "classification":
            raise _no_classes(where, f"{values[values != np.floor(values)][0]}")
        return numbers
    contiguous = values[0] == 0 and values[-1] == len(values) - 1 > 0
    if task == "classification" or (contiguous and len(targets[0]) >= _MIN_SAMPLES_A_CLASS * len(values)):
        if task == "auto":
            tell(f"the targets of {where} are 0.0 to {values[-1]}: trained as classes, unless --task regression")
        return Meaning("classification", lambda array: _class_numbers(array, where))
    tell(f"the targets of {where} are whole numbers: trained as numbers, unless --task classification")
    return numbers


def _one_hot(width: int, where: str) -> Meaning:
    def convert(rows: np.ndarray) -> np.ndarray:
        if not _is_one_hot(rows):
            raise _no_classes(where, "a row that is not one-hot")
        return rows.argmax(1).astype(np.int64)

    return Meaning("classification", convert, width)


def _class_numbers(array: np.ndarray, where: str) -> np.ndarray:
    numbers = array[:, 0].astype(np.int64)
    if (numbers != array[:, 0]).any():
        raise _no_classes(where, str(array[numbers != array[:, 0]][0, 0]))
    return numbers


def _is_one_hot(rows: np.ndarray) -> bool:
    return rows.shape[1] > 1 and bool(((rows == 0) | (rows == 1)).all() and (rows.sum(1) == 1).all())


def _are_shares(rows: np.ndarray) -> bool:
    return bool((rows >= 0).all() and (np.abs(rows.sum(1) - 1) < _SUM_TOLERANCE).all())


def _no_classes(where: str, received: str) -> UserError:
    return UserError(
        f"expected classes as the targets of {where} (whole numbers, names or one-hot rows), received {received}; "
        "correct that, or give --task regression"
    )


def labels_of(samples: Any, target: str | None = None) -> np.ndarray | None:
    """Return the labels of all samples, without reading these; None if the data set does not hold them.

    `target` is the column of the labels in Hugging Face's data sets; others hold them as torchvision's do.
    """
    kind = torch_wrapper(samples)
    if kind == "TensorDataset":
        labels = plain(samples.tensors[-1])
    elif kind == "Subset":
        whole = labels_of(samples.dataset, target)
        labels = None if whole is None else whole[np.asarray(samples.indices, np.int64)]
    elif kind == "ConcatDataset":
        parts = [labels_of(part, target) for part in samples.datasets]
        known = [part for part in parts if part is not None]
        labels = np.concatenate(known) if len(known) == len(parts) else None
    elif target in _hf_features(samples):
        labels = samples.with_format("numpy", columns=[target])[:][target]
    else:
        labels = plain(getattr(samples, "targets", None))
    if labels is None or getattr(samples, "target_transform", None) is not None:
        return None
    try:
        array = np.asarray(labels)
        array = np.asarray(array.tolist()) if array.dtype == object else array
    except ValueError:  # lists of different lengths
        return None
    if array.size != len(samples) or array.dtype.kind not in "iubU":
        return None
    return array.reshape(-1) if array.dtype.kind == "U" else array.reshape(-1).astype(np.int64)


def class_names_of(samples: Any, target: str | None = None) -> tuple[str, ...]:
    """Return the names of the classes that a data set, or the one of which it is a part, holds; else none."""
    kind = torch_wrapper(samples)
    if kind == "Subset":
        return class_names_of(samples.dataset, target)
    if kind == "ConcatDataset":
        names = {class_names_of(part, target) for part in samples.datasets}
        return names.pop() if len(names) == 1 else ()
    classes = getattr(_hf_features(samples).get(target), "names", None) or getattr(samples, "classes", None)
    return names_in(classes)


def names_in(classes: Any) -> tuple[str, ...]:
    """Return the names in a collection of them; none if it is something else."""
    return tuple(map(str, classes)) if hasattr(classes, "__len__") else ()


def number_of(samples: Any, name: str) -> int | None:
    """Return an attribute if it is a whole number, else None."""
    try:
        return operator.index(getattr(samples, name, None))  # pyright: ignore
    except TypeError:
        return None


def _hf_features(samples: Any) -> Mapping[str | None, Any]:
    """Return the columns of a Hugging Face data set by name; none for any other."""
    return getattr(samples, "features", None) or {} if hasattr(samples, "with_format") else {}


def torch_wrapper(samples: Any) -> str | None:
    """Return the name of a class of PyTorch's own; None for a subclass, which may return other samples."""
    return type(samples).__name__ if type(samples).__module__.startswith("torch.utils.data") else None
