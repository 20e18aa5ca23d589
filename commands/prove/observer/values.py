"""Values recorded of arrays: digests to compare their bits, projections to compare their means, and digests of samples.

Every tensor is a part with one row for each sample. Parts with equally many rows belong together, except those that are
constant, such as a mask of ones. The largest such group has the samples.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from allstep.commands.prove.records import Held, Projections
from allstep.common.files.strict_json import LARGEST

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


AsRows = Callable[[Any], "np.ndarray | None"]
"""Function that returns an array whose first dimension is that of the samples; None for what is no tensor."""

_MAX_DEPTH = 6
_MAX_ROWS = 1024
_IMAGE_CHANNELS = (1, 3, 4)
_MAX_HELD = 1024
_HELD_SECONDS = 5.0
_DISTINCT = 0.9


@dataclass(frozen=True)
class _Part:
    num_bytes: int
    rows: tuple[str, ...]

    @property
    def is_alike(self) -> bool:
        return len(self.rows) > 1 and len({*self.rows}) == 1


class Samples:
    """Samples of one process; remembers the inputs of each call site, to know the constant ones."""

    def __init__(self, as_rows: AsRows) -> None:
        self._as_rows = as_rows
        self._last: dict[tuple[Hashable, int], tuple[str, ...]] = {}

    def rows(self, inputs: Any, site: Hashable = None) -> tuple[str, ...]:
        """Return a digest of each sample in the inputs of a call at a site; empty if none can be told from others."""
        return self.sized(inputs, site)[0]

    def sized(self, inputs: Any, site: Hashable = None) -> tuple[tuple[str, ...], int]:
        """Return these digests, and how many bytes the samples have."""
        parts = list(self._parts(inputs, 0))
        kept = [part for index, part in enumerate(parts) if not self._is_constant((site, index), part)]
        groups: dict[int, list[_Part]] = defaultdict(list)
        for part in kept or [part for part in parts if not part.is_alike]:
            groups[len(part.rows)].append(part)
        if not groups:
            return (), 0
        group = max(groups.values(), key=lambda parts: sum(part.num_bytes for part in parts))
        rows = (
            group[0].rows if len(group) == 1 else tuple(map(_joined, zip(*(part.rows for part in group), strict=True)))
        )
        # Rows such as the kinds of atoms have few values, and do not tell samples apart.
        num_bytes = sum(part.num_bytes for part in group)
        return (rows if 2 * len({*rows}) > len(rows) else (_joined(rows),)), num_bytes

    def _is_constant(self, key: tuple[Hashable, int], part: _Part) -> bool:
        last = self._last.get(key)
        self._last[key] = part.rows
        return part.is_alike or last == part.rows

    def _parts(self, value: Any, depth: int) -> Iterator[_Part]:
        rows = self._as_rows(value)
        if rows is not None:
            if len(rows):
                yield _Part(rows.nbytes, row_digests(rows[:: -(-len(rows) // _MAX_ROWS)]))
        elif (isinstance(value, list) or (isinstance(value, tuple) and depth > 1)) and _are_samples(value):
            items = [list(self._parts(item, depth + 1)) for item in value]
            rows = tuple(_joined(row for part in parts for row in part.rows) for parts in items)
            if all(items):
                yield _Part(sum(part.num_bytes for parts in items for part in parts), rows)
        elif isinstance(value, (list, tuple)) and value and all(isinstance(item, (str, bytes)) for item in value):
            yield _Part(sum(map(len, value)), tuple(_joined([str(item)]) for item in value))
        elif depth < _MAX_DEPTH:
            for item in _items(value):
                yield from self._parts(item, depth + 1)


def held(num_samples: int, digest_at: Callable[[int], str]) -> Held | None:
    """Return digests of a data set by a function of the position; None if many are equal, or if there are none.

    If reading takes long, the ranks look at fewer samples, in the same order.
    """
    deadline = time.monotonic() + _HELD_SECONDS
    digests = []
    for placement in _placements(num_samples):
        digests.append(digest_at(placement))
        if time.monotonic() > deadline:
            break
    has_content = len({*digests}) >= _DISTINCT * len(digests)
    return Held(tuple(digests)) if has_content and len(digests) > 1 else None


def _placements(num_samples: int) -> list[int]:
    """Return positions that are evenly spaced, in an order in which every beginning is evenly spaced as well."""
    number = min(num_samples, _MAX_HELD)
    width = max(1, (number - 1).bit_length())
    order = sorted(range(number), key=lambda index: int(f"{index:0{width}b}"[::-1], 2))
    return [index * num_samples // number for index in order]


def _are_samples(values: Any) -> bool:
    """Return whether a list has one element for each sample, as those of images and of boxes in detection."""
    if not values:
        return False
    if all(isinstance(value, Mapping) for value in values):
        return True
    shapes: list[tuple[int, ...]] = [tuple(getattr(value, "shape", ())) for value in values]
    if not all(shapes) or len({len(shape) for shape in shapes}) > 1:
        return False
    has_images = all(len(shape) == 3 and shape[0] in _IMAGE_CHANNELS for shape in shapes)
    return has_images or (len(shapes) > 2 and len({shape[0] for shape in shapes}) > 1)


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from (value[key] for key in sorted(value, key=str))
    elif isinstance(value, (list, tuple)):
        yield from value
    elif not callable(value) and hasattr(value, "__dict__"):
        yield from vars(value).values()


def _joined(rows: Any) -> str:
    return hashlib.blake2b(" ".join(rows).encode(), digest_size=8).hexdigest()
