"""Classes of unequal size: weights of the classes in the loss, and an order in which all classes come equally often."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.data.datasets.base import Dataset, Split, Subset
from allstep.common.data.passed_over import tell
from allstep.common.data.sharding import sample_order
from allstep.common.files.npy import read_numbers

_READ_AT_ONCE = 4096
# Multiples of it are added to the epoch, so that the permutation of each class differs from that of any epoch.
_CLASSES = 2**40


def tell_alike(names: Iterable[str]) -> None:
    """Warn of two classes whose names differ only as typing errors do."""
    known: dict[str, str] = {}
    for name in names:
        if (other := known.setdefault(look(name), name)) != name:
            tell(f"two classes look alike, {ascii(other)} and {ascii(name)}; if they are one, give them one name")
            return


def look(name: str) -> str:
    """Return a name without what is not seen: forms of Unicode, blanks around it, characters without width."""
    return "".join(c for c in unicodedata.normalize("NFKC", name) if unicodedata.category(c) != "Cf").strip()


def labels_of(split: Split) -> np.ndarray:
    """Return the class numbers (n,) of all samples of a split."""
    if isinstance(split, Subset):
        return labels_of(split.whole)[split.indices] if split.targets is not None else _read_labels(split)
    targets = getattr(split, "targets", None)
    return np.asarray(targets) if targets is not None else _read_labels(split)


def _read_labels(split: Split) -> np.ndarray:
    starts = range(0, len(split), _READ_AT_ONCE)
    parts = (np.arange(start, min(start + _READ_AT_ONCE, len(split))) for start in starts)
    return np.concatenate([split.read(part, epoch=0)[1] for part in parts])


def read_class_weights(path: Path) -> np.ndarray:
    """Return the numbers of a file of --class-weights.

    Raises UserError if the file cannot be read, or has a number that cannot be a weight.
    """
    weights = read_numbers(path, "--class-weights", "a weight of 0 or more for each class")
    if not weights.size or weights.min() < 0 or weights.max() == 0:
        raise UserError(
            f"expected --class-weights to hold weights of 0 or more, not all of them 0, received {weights.size} numbers"
            f"{f' from {weights.min():g} to {weights.max():g}' if weights.size else ''}; correct the file"
        )
    return weights


def class_weights_of(flag: str | None, dataset: Dataset) -> tuple[float, ...]:
    """Return the weight of each class in the training loss, none without --class-weights.

    `balanced` gives a class n / (k * n_c), for n samples in k classes of which n_c have this class: on average, a
    sample weighs 1. scikit-learn's compute_class_weight has the same formula. Raises UserError if the data set has no
    such classes, or a weight is missing.
    """
    if flag is None:
        return ()
    if dataset.task != "classification":
        raise UserError(
            f"--class-weights needs a data set of classes, received targets for {dataset.task}; leave it out"
        )
    if flag != "balanced":
        weights = read_class_weights(Path(flag))
        if len(weights) != dataset.num_classes:
            raise UserError(
                f"expected --class-weights to hold a weight for each of {dataset.num_classes} classes, received "
                f"{len(weights)}; write them in the order of the classes"
            )
        return tuple(map(float, weights))
    sizes = np.bincount(labels_of(dataset.train), minlength=dataset.num_classes)
    if not sizes.all():
        number = int(sizes.argmin())
        name = dataset.class_names[number] if dataset.class_names else str(number)
        raise UserError(
            f"expected training samples of every class with --class-weights balanced, received none of class {name}; "
            "name a file with a weight for each class"
        )
    return tuple(map(float, sizes.sum() / (len(sizes) * sizes)))


@dataclass(frozen=True)
class BalancedOrder:
    """Order of an epoch in which all classes come equally often, give or take one sample (--sampler balanced).

    An epoch keeps its length. Each sample of a class comes equally often, give or take one: those of small classes
    several times an epoch, those of large ones in some epochs alone.
    """

    by_class: np.ndarray
    """Indices of all training samples, class by class, int64 (samples,)."""
    starts: np.ndarray
    """Start in `by_class` of each class that has samples, and the number of samples, int64 (classes + 1,)."""

    @classmethod
    def of(cls, labels: np.ndarray) -> BalancedOrder:
        """Return the order of samples of these classes."""
        sizes = np.bincount(labels)
        return cls(np.argsort(labels, kind="stable"), np.concatenate([[0], np.cumsum(sizes[sizes > 0])]))

    def order(self, positions: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
        """Return the samples at the given positions of an epoch's order, as `sharding.sample_order` does."""
        num_classes = len(self.starts) - 1
        shuffled = sample_order(positions, len(self.by_class), seed=seed, epoch=epoch)
        # Each epoch gives the samples that are left over to other classes.
        classes, numbers = (shuffled + epoch) % num_classes, shuffled // num_classes
        samples = np.empty(positions.size, np.int64)
        for one in np.unique(classes):
            start, size, here = int(self.starts[one]), int(self.starts[one + 1] - self.starts[one]), classes == one
            stream = epoch + (int(one) + 1) * _CLASSES
            samples[here] = start + sample_order(numbers[here] % size, size, seed=seed, epoch=stream)
        return self.by_class[samples]


def balanced_order_of(dataset: Dataset) -> BalancedOrder:
    """Return the order of --sampler balanced. Raises UserError if the data set has no classes."""
    if dataset.task != "classification":
        raise UserError(
            f"--sampler balanced needs a data set of classes, received targets for {dataset.task}; leave it out"
        )
    return BalancedOrder.of(labels_of(dataset.train))
