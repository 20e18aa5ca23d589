"""What is written down of arrays: digests to compare their bits, projections to compare their means."""

from __future__ import annotations

import functools
import hashlib
import math
from typing import TYPE_CHECKING

from allstep.commands.prove.records import Projections

if TYPE_CHECKING:
    import numpy as np

MAX_VALUES = 4096
"""Of a tensor that are projected: evenly spaced ones, where it has more."""
_NUM_DIRECTIONS = 4


def digest(array: np.ndarray) -> str:
    """64 bits of the bytes of an array."""
    import numpy as np

    return hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=8).hexdigest()


def row_digests(array: np.ndarray) -> tuple[str, ...]:
    """A digest of each sample, of which the first dimension has one a place."""
    return tuple(map(digest, array))


def stride(num_values: int) -> int:
    """How far apart the values are that are projected."""
    return -(-num_values // MAX_VALUES) or 1


def projections(values: np.ndarray) -> Projections | None:
    """Products with fixed directions of at most MOST_VALUES values; None where they are not finite.

    The directions are the same in every process, and nobody's random state is touched.
    """
    products = tuple(map(float, _directions()[:, : len(values)] @ values.astype("float64")))
    return products if all(map(math.isfinite, products)) else None


def finite(number: float) -> float | None:
    """A number as records have it; None where it is infinite or not a number, which JSON does not know."""
    return float(number) if math.isfinite(number) else None


@functools.cache
def _directions() -> np.ndarray:
    import numpy as np

    return np.random.Generator(np.random.PCG64(0)).choice([-1.0, 1.0], (_NUM_DIRECTIONS, MAX_VALUES))
