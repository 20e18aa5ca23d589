"""The collectives that the engine calls, for sums, checks and state; gradients meet inside the strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np


class Collectives(Protocol):
    """Collectives of NumPy arrays over the ranks of a job; each strategy has its own."""

    @property
    def rank(self) -> int:
        """Number of this rank among those that share the samples."""
        ...

    @property
    def world_size(self) -> int:
        """How many ranks share the samples; stages of a pipeline, which all take the same ones, count as one."""
        ...

    def all_reduce_sum(self, values: np.ndarray) -> np.ndarray:
        """Sum float64 `values` (n,) over all ranks; every rank gets the result."""
        ...

    def all_gather(self, values: np.ndarray) -> np.ndarray:
        """Int64 `values` (n,) of all ranks, (world_size, n) in the order of ranks."""
        ...

    def broadcast_arrays(self, arrays: Mapping[str, np.ndarray], root: int = 0) -> dict[str, np.ndarray]:
        """The arrays of rank `root`; the others pass arrays of the same names, shapes and types."""
        ...

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        ...


class OneRank:
    """The collectives of a process that has no others to talk to."""

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
