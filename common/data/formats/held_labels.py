"""Labels and names of classes that map-style data sets hold as attributes, which are known without reading samples."""

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from allstep.common.data.formats.arrays import plain


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
