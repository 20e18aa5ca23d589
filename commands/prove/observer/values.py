"""Values recorded of arrays: digests to compare their bits, projections to compare their means."""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING

from allstep.commands.prove.records import Projections
from allstep.common.files.schema import LARGEST

if TYPE_CHECKING:
    import numpy as np

MAX_VALUES = 4096
"""Largest number of values of a tensor that are projected; evenly spaced ones if it has more."""
_NUM_DIRECTIONS = 4


def digest(array: np.ndarray) -> str:
    """Return a 64-bit digest of an array's bytes."""
    import numpy as np

    return hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=8).hexdigest()


def row_digests(array: np.ndarray) -> tuple[str, ...]:
    """Return a digest of each sample along the first dimension."""
    return tuple(map(digest, array))


def stride(num_values: int) -> int:
    """Return the distance between the values that are projected."""
    return -(-num_values // MAX_VALUES) or 1


def projections(values: np.ndarray) -> Projections | None:
    """Return products of at most MAX_VALUES values with fixed directions; None if records cannot have any product.

    The directions are the same in every process, and no global random state is changed.
    """
    products = tuple(map(float, _directions()[:, : len(values)] @ values.astype("float64")))
    return None if None in map(finite, products) else products


def finite(number: float) -> float | None:
    """Return a number as records have it; None if it is NaN or huge, as where a script diverges."""
    return float(number) if abs(number) < LARGEST else None


@functools.cache
def _directions() -> np.ndarray:
    import numpy as np

    return np.random.Generator(np.random.PCG64(0)).choice([-1.0, 1.0], (_NUM_DIRECTIONS, MAX_VALUES))
