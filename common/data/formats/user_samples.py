"""Samples passed by a user's program: arrays, or objects that read samples."""

from __future__ import annotations

from typing import Any

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.data.datasets.base import Dataset, Split
from allstep.common.data.datasets.subset import hold_out
from allstep.common.data.formats.arrays import array_split, inputs_of, targets_of
from allstep.common.data.formats.task_inference import describe


def as_dataset(train: Any, validation: Any, *, where: str, share: float, seed: int) -> Dataset:
    """Build a data set from two splits, each a pair of inputs and targets or an object that reads them.

    Args:
        validation: None to hold out a share of `train`.
        where: name of the data set in error messages.

    Raises:
        UserError: a split is something else, or see `describe`.
    """
    split = as_split(train, where)
    if validation is None:
        return describe(*hold_out(split, split, share=share, seed=seed, where=where), where=where)
    return describe(split, as_split(validation, where), where=where)


def as_split(samples: Any, where: str) -> Split:
    """Return a pair of arrays, or an object with `__len__` and `read(indices, epoch)`, as a split.

    Raises:
        UserError: `samples` is neither, or see `array_split`.
    """
    if hasattr(samples, "read") and hasattr(samples, "__len__"):
        return CheckedSplit(samples, where)
    if isinstance(samples, (tuple, list)) and len(samples) == 2:
        return array_split(samples[0], samples[1], where)
    raise UserError(
        f"expected {where} to be inputs and targets, or an object with __len__ and read(indices, epoch), received "
        f"{type(samples).__name__}; give one of them"
    )


class CheckedSplit:
    """Split that wraps a user's object with `__len__` and `read(indices, epoch)`, and checks what it returns."""

    parallel = True

    def __init__(self, samples: Any, where: str) -> None:
        """Wrap `samples`, which may have `targets` (array of all targets) or `num_classes`, and `num_tokens`."""
        self.samples, self.where = samples, where
        self.num_classes = getattr(samples, "num_classes", None)
        self.num_tokens = getattr(samples, "num_tokens", None)
        targets = getattr(samples, "targets", None)
        self.targets = None if targets is None else targets_of(targets, f"the targets of {where}")

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, indices: np.ndarray, *, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        inputs, targets = self.samples.read(indices, epoch=epoch)
        inputs = inputs_of(inputs, f"the inputs of {self.where}", indices)
        targets = targets_of(targets, f"the targets of {self.where}", indices)
        if not len(inputs) == len(targets) == len(indices):
            raise UserError(
                f"expected read() of {self.where} to return {len(indices)} samples, as many as indices, received "
                f"{len(inputs)} inputs and {len(targets)} targets; correct it"
            )
        return inputs, targets
