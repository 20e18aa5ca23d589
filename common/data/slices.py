"""Slices of a global batch that each rank has, and the fixed order in which their gradients are added.

With `--slices V` a global batch is cut into V slices, whatever the number of ranks, and each slice has a separate
forward and backward pass. Floating-point sums depend on their order, so all of them follow one binary tree over the
slice numbers, which depends only on V:

    (0, 8) = (0, 4) + (4, 8),  (0, 4) = (0, 2) + (2, 4),  (0, 2) = (0, 1) + (1, 2), ...

A rank has consecutive slices. It adds them up as far as the tree goes within them, which leaves one sum if the number
of ranks is a power of two that divides V, and otherwise a few; the ranks add those up by the same tree.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

Node = tuple[int, int]
"""Node of the tree: the sum of the slices [first, end)."""


Value = TypeVar("Value")
"""Tensor or array of either framework."""


def local_slices(rank: int, world_size: int, num_slices: int) -> range:
    """Return the numbers of a rank's slices; the ranks' shares differ by at most one slice."""
    return range(rank * num_slices // world_size, (rank + 1) * num_slices // world_size)


class TreeSum(Generic[Value]):
    """Sum over slices in the order of the tree, in whatever order they are added.

    It keeps one value for each node whose sibling is still missing.
    """

    def __init__(self, num_slices: int, *, add: Callable[[Any, Any], Any] = operator.iadd) -> None:
        """Start an empty sum; `add` may change its first argument in place and return it."""
        self._num_slices, self._add = num_slices, add
        self.partial: dict[Node, Value] = {}
        """Sums so far, no two of which can be added yet."""

    def add(self, node: Node, value: Value) -> None:
        """Add the value of a slice or another node of the tree; the value may be changed in place."""
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
        """Sum of all slices; all must have been added."""
        return self.partial[0, self._num_slices]


def local_nodes(rank: int, world_size: int, num_slices: int) -> tuple[Node, ...]:
    """Return the nodes to which a rank's slices add up, in the order of slice numbers."""
    own = local_slices(rank, world_size, num_slices)

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
    """Plan of a sum: what each rank contributes, and whether a library's all-reduce adds in the order of the tree.

    An all-reduce adds up in an order of its own, which changes with the number of ranks. Where a trial shows that it is
    the tree's (two ranks have no other, and Open MPI's halving and doubling has it on four), that is what is used. Else
    each rank gets one part of all ranks' sums (all-to-all), adds them up by the tree, and all of them get all parts
    (all-gather): of a vector of M bytes a rank that has one sum sends 2 (N - 1) / N M bytes to the N - 1 others, as in
    a ring.
    """

    def __init__(self, num_slices: int, rank: int, world_size: int, exchange: Any = None) -> None:
        """`exchange` is for more than one rank."""
        self.num_slices, self.rank, self.world_size = num_slices, rank, world_size
        self._exchange = exchange
        self.nodes = [local_nodes(other, world_size, num_slices) for other in range(world_size)]
        """Nodes of the tree that each rank contributes."""
        self.in_order: dict[int, bool] = {}
        """Whether an all-reduce of so many elements adds up in order; known from the first such sum on."""

    def padding(self, size: int) -> int:
        """Return how many elements a vector of `size` lacks to be cut into equal parts for all ranks."""
        return -size % self.world_size

    def add_up(self, parts: Sequence[Value], add: Callable[[Any, Any], Any] = operator.iadd) -> Value:
        """Return the sum of what all ranks contribute: the nodes of rank 0, of rank 1, ...; for `add` see `TreeSum`."""
        sums: TreeSum[Value] = TreeSum(self.num_slices, add=add)
        for node, part in zip(itertools.chain.from_iterable(self.nodes), parts, strict=True):
            sums.add(node, part)
        return sums.total

    def is_in_order(self, size: int, all_reduce: Callable[[np.ndarray], np.ndarray] | None) -> bool:
        """Return whether an all-reduce of `size` elements adds up in the order of the tree; all ranks call it.

        `all_reduce` is tried once for each size; it is None where its order depends on more than the size.
        """
        if size not in self.in_order:
            # Of two ranks each has one half of the tree, and a sum of two numbers has only one order.
            self.in_order[size] = self.world_size == 2 or (
                all_reduce is not None and self._agrees_in_trial(size, all_reduce)
            )
        return self.in_order[size]

    def _agrees_in_trial(self, size: int, all_reduce: Callable[[np.ndarray], np.ndarray]) -> bool:
        """Return whether all ranks find the sum of the tree in an all-reduce of `size` elements."""
        if size < SMALLEST_TRIAL or any(len(nodes) > 1 for nodes in self.nodes):
            return False
        expected = self.add_up([trial(other) for other in range(self.world_size)])
        found = all_reduce(np.resize(trial(self.rank), size))
        agrees = np.array([np.array_equal(found, np.resize(expected, size))], np.float32)
        return float(all_reduce(agrees)[0]) == self.world_size


def trial(rank: int) -> np.ndarray:
    """Return float32 (4093,) numbers of a rank whose sum over ranks shows in which order a library adds them up.

    Each order rounds differently. One of every eight numbers is so small that the sum also shows whether the library
    flushes sums below the smallest normal number, 2^-126, to 0.
    """
    draw = np.random.default_rng(rank)
    values = draw.standard_normal(_TRIAL_PERIOD, np.float32) * np.exp2(draw.integers(-12, 13, _TRIAL_PERIOD))
    small = np.copysign(2.0**-126 * draw.uniform(1, 3, _TRIAL_PERIOD), values)
    return np.where(np.arange(_TRIAL_PERIOD) % 8, values, small).astype(np.float32)


_TRIAL_PERIOD = 4093
"""Prime length, so that the chunks into which a library cuts a repetition of the numbers start at different ones."""
SMALLEST_TRIAL = 1024
"""Minimum number of elements of a trial; with fewer, two orders might give equal sums by chance."""


def _halves(node: Node) -> tuple[Node, Node]:
    first, end = node
    middle = (first + end) // 2
    return (first, middle), (middle, end)


@functools.cache
def _family(node: Node, num_slices: int) -> tuple[Node, Node, Node]:
    """Return the parent of a node other than the root, and the parent's two halves."""
    parent = (0, num_slices)
    while node not in (halves := _halves(parent)):
        parent = halves[node[0] >= halves[1][0]]
    return parent, *halves
