"""Collectives that the engine calls for sums, checks and state; the strategy itself all-reduces gradients."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np


class Collectives(Protocol):
    """Collectives of NumPy arrays over the ranks of a job; each strategy implements them."""

    @property
    def rank(self) -> int:
        """Index of this rank among the ranks that share the samples."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks that share the samples; the stages of a pipeline, which see the same ones, count as one."""
        ...

    def all_reduce_sum(self, values: np.ndarray) -> np.ndarray:
        """Return float64 `values` (n,) summed over all ranks."""
        ...

    def all_gather(self, values: np.ndarray) -> np.ndarray:
        """Return int64 `values` (n,) of all ranks, (world_size, n) in the order of ranks."""
        ...

    def broadcast_arrays(self, arrays: Mapping[str, np.ndarray], root: int = 0) -> dict[str, np.ndarray]:
        """Return the arrays of rank `root`; the others pass arrays of the same names, shapes and types."""
        ...

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        ...


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Return an array in the order of its axes as bytes in the same memory: libraries do not send all types."""
    return array.reshape(-1).view(np.uint8)


class OneRank:
    """Collectives of a job with a single rank."""

    rank = 0
    world_size = 1

    def all_reduce_sum(self, values: np.ndarray) -> np.ndarray:
        return values

    def all_gather(self, values: np.ndarray) -> np.ndarray:
        return values[np.newaxis]

    def broadcast_arrays(self, arrays: Mapping[str, np.ndarray], root: int = 0) -> dict[str, np.ndarray]:
        return dict(arrays)

    def barrier(self) -> None:
        pass
