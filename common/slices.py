"""Bit for bit: which slices of a global batch a rank has, and the one order in which their gradients are added.

With `--slices V` a global batch is cut into V slices, whatever the number of ranks, and each slice has its own forward
and backward pass. Floating-point sums depend on their order, so all of them follow one binary tree over the numbers of
the slices, which depends on V alone:

    (0, 8) = (0, 4) + (4, 8),  (0, 4) = (0, 2) + (2, 4),  (0, 2) = (0, 1) + (1, 2), ...

A rank has slices that follow one another. It adds them up as far as the tree goes within them, which leaves it one sum
where the number of ranks is a power of two that divides V, and a few else; ranks add those up by the same tree.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np

Node = tuple[int, int]
"""The sum of the slices [first, end)."""


Value = TypeVar("Value")
"""A tensor or an array of either framework."""


def own_slices(rank: int, world_size: int, num_slices: int) -> range:
    """Numbers of the slices that a rank has: as many as another one has, or one more."""
    return range(rank * num_slices // world_size, (rank + 1) * num_slices // world_size)


class TreeSum(Generic[Value]):
    """A sum over slices in the order of the tree, in whatever order they come.

    It keeps one value for each part of the tree that is there and whose other half is not.
    """

    def __init__(self, num_slices: int, *, add: Callable[[Any, Any], Any] = operator.iadd) -> None:
        """`add` may change its first argument and return that."""
        self._num_slices, self._add = num_slices, add
        self.partial: dict[Node, Value] = {}
        """The sums so far, none of which can be added to another one yet."""

    def add(self, node: Node, value: Value) -> None:
        """Add the value of a slice, or a sum that is a node of the tree; it may be changed in place."""
        while node != (0, self._num_slices):
            parent, left, right = _family(node, self._num_slices)
            other = self.partial.pop(left if node == right else right, None)
            if other is None:
                break
            first, second = (other, value) if node == right else (value, other)
            value, node = self._add(first, second), parent
        self.partial[node] = value

    @property
    def total(self) -> Value:
        """The sum of all slices, which are all there."""
        return self.partial[0, self._num_slices]


def own_nodes(rank: int, world_size: int, num_slices: int) -> tuple[Node, ...]:
    """The sums that a rank's own slices come to, in the order of their numbers."""
    own = own_slices(rank, world_size, num_slices)

    def within(node: Node) -> list[Node]:
        first, end = node
        if end <= own.start or own.stop <= first:
            return []
        if own.start <= first and end <= own.stop:
            return [node]
        left, right = _halves(node)
        return within(left) + within(right)

    return tuple(within((0, num_slices)))


class SumPlan:
    """Which sums each rank contributes, and whether a library's all-reduce adds them up in the order of the tree."""

    def __init__(self, num_slices: int, rank: int, world_size: int) -> None:
        self.num_slices, self.rank, self.world_size = num_slices, rank, world_size
        self.nodes = [own_nodes(other, world_size, num_slices) for other in range(world_size)]
        """Of each rank."""
        self.in_order: dict[int, bool] = {}
        """Whether an all-reduce of so many elements adds up in order; known from the first such sum on."""

    def padding(self, size: int) -> int:
        """Return how many elements a vector of `size` lacks to be cut into equal parts for all ranks."""
        return -size % self.world_size

    def is_in_order(self, size: int, all_reduce: Callable[[np.ndarray], np.ndarray] | None) -> bool:
        """Return whether an all-reduce of `size` elements adds up in the order of the tree; all ranks call it.

        Args:
            all_reduce: tried once for each size; None where its order depends on more than the size.
        """
        if size not in self.in_order:
            # Of two ranks each has one half of the tree, and a sum of two numbers has only one order.
            self.in_order[size] = self.world_size == 2 or (
                all_reduce is not None
                and adds_in_order(
                    all_reduce, size, rank=self.rank, world_size=self.world_size, num_slices=self.num_slices
                )
            )
        return self.in_order[size]


def adds_in_order(
    all_reduce: Callable[[np.ndarray], np.ndarray], size: int, *, rank: int, world_size: int, num_slices: int
) -> bool:
    """Whether a library's all-reduce of `size` elements adds up in the order of the tree; all ranks call it.

    Args:
        all_reduce: the sum of a float32 array of each rank, in an order that depends on the size alone.
    """
    if size < SMALLEST_TRIAL or any(len(own_nodes(other, world_size, num_slices)) > 1 for other in range(world_size)):
        return False
    expected: TreeSum[np.ndarray] = TreeSum(num_slices)
    for other in range(world_size):
        [node] = own_nodes(other, world_size, num_slices)
        expected.add(node, trial(other))
    found = all_reduce(np.resize(trial(rank), size))
    agrees = np.array([np.array_equal(found, np.resize(expected.total, size))], np.float32)
    return float(all_reduce(agrees)[0]) == world_size


def trial(rank: int) -> np.ndarray:
    """Float32 (4093,): numbers of a rank whose sum over ranks shows in which order a library adds them up.

    Each order rounds otherwise. Of each eight numbers one is so small that it shows as well whether sums below the
    smallest normal number, 2^-126, count as 0.
    """
    draw = np.random.default_rng(rank)
    values = draw.standard_normal(_TRIAL_PERIOD, np.float32) * np.exp2(draw.integers(-12, 13, _TRIAL_PERIOD))
    small = np.copysign(2.0**-126 * draw.uniform(1, 3, _TRIAL_PERIOD), values)
    return np.where(np.arange(_TRIAL_PERIOD) % 8, values, small).astype(np.float32)


_TRIAL_PERIOD = 4093
"""A prime, so that the parts into which a library cuts a repetition of them begin at other numbers."""
SMALLEST_TRIAL = 1024
"""Elements of a sum, of which fewer might be equal by chance."""


def _halves(node: Node) -> tuple[Node, Node]:
    first, end = node
    middle = (first + end) // 2
    return (first, middle), (middle, end)


@functools.cache
def _family(node: Node, num_slices: int) -> tuple[Node, Node, Node]:
    """The sum that a node other than the whole enters into, and the two halves of that."""
    parent = (0, num_slices)
    while node not in (halves := _halves(parent)):
        parent = halves[node[0] >= halves[1][0]]
    return parent, *halves
