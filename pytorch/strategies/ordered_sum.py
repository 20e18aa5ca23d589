"""The sum of the slices' vectors over all ranks in one fixed order; `common/data/slices.py` says in which, and how.

Sums of several vectors overlap with what else a rank does, and with each other: see `SumsUnderWay`.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch

from allstep.common.data.slices import Node, SumPlan

Wait = Callable[[], torch.Tensor]
"""Waits for an operation that was started, and returns its result."""


class Exchange(Protocol):
    """Operations on vectors over all ranks. All ranks give an operation the same `number`; no pending other has it."""

    @property
    def keeps_order(self) -> bool:
        """Whether the order of `all_reduce` depends on the size of a vector alone."""
        ...

    def all_to_all(self, sent: torch.Tensor, received_sizes: list[int], number: int) -> Wait:
        """Return the elements that each rank has sent to this one, in the order of ranks.

        `sent` is cut into equal parts for rank 0, rank 1, ...
        """
        ...

    def all_gather(self, part: torch.Tensor, number: int) -> Wait:
        """Return the parts of all ranks, which have the same size, in the order of ranks."""
        ...

    def all_reduce(self, vector: torch.Tensor, number: int) -> Wait:
        """Return the sum of the ranks' vectors, added in any order; `vector` may be overwritten."""
        ...


class OrderedSum(SumPlan):
    """Sum over the slices of all ranks, with the same bits on every rank and on any number of ranks."""

    _exchange: Exchange | None

    @property
    def num_parts(self) -> int:
        """Number of parts of the vectors; each rank receives the sum of one part."""
        return 1

    def __call__(self, partial: Mapping[Node, torch.Tensor]) -> torch.Tensor:
        """Return the sum over all slices; see `begin`."""
        return self.begin(partial, 0)()()

    def begin(self, partial: Mapping[Node, torch.Tensor], number: int) -> Callable[[], Wait]:
        """Begin the sum over all slices; return a function that starts its second half and returns a `Wait` for it.

        All ranks call that function before the next sum, in the same order. `partial` is this rank's
        `TreeSum.partial`: vectors of one size, with padding. `number` is that of `Exchange`.
        """
        if self._exchange is None:
            return lambda: lambda: partial[0, self.num_slices]
        exchange, own = self._exchange, partial[self.nodes[self.rank][0]]

        def all_reduce(array: np.ndarray) -> np.ndarray:
            return exchange.all_reduce(torch.from_numpy(array), number)().numpy()

        if not self.is_in_order(own.numel(), all_reduce if exchange.keeps_order else None):
            part = self._begin_local_part(exchange, partial, number)
            return lambda: exchange.all_gather(part(), number)
        wait = exchange.all_reduce(own, number)
        # On more than two ranks, Horovod must not fuse two pending sums: their joint size was not tried.
        return lambda: wait if self.world_size == 2 else _waited(wait)

    def _begin_local_part(self, exchange: Exchange, partial: Mapping[Node, torch.Tensor], number: int) -> Wait:
        own = [partial[node] for node in self.nodes[self.rank]]
        part_size = own[0].numel() // self.world_size
        # Each rank gets its part of all of this rank's sums.
        sent = own[0] if len(own) == 1 else torch.stack([one.view(self.world_size, -1) for one in own], 1).flatten()
        received = exchange.all_to_all(sent, [len(nodes) * part_size for nodes in self.nodes], number)
        return lambda: self.add_up(received().split(part_size))


class OrderedScatter(OrderedSum):
    """Sum of which each rank needs only a part, so that there is no all-gather."""

    @property
    def num_parts(self) -> int:
        return self.world_size

    def begin(self, partial: Mapping[Node, torch.Tensor], number: int) -> Callable[[], Wait]:
        """Begin this rank's part of the sum; the parts have the same size and are in the order of ranks."""
        if self._exchange is None:
            return super().begin(partial, number)
        part = self._begin_local_part(self._exchange, partial, number)
        return lambda: _waited(part)


class SumsUnderWay:
    """Overlapping sums of several vectors: each begins as soon as its vector is available.

    All ranks begin them in the same order. Before a sum begins, the first half of the previous sum must be complete,
    and its second half begins.
    """

    def __init__(self, ordered_sum: OrderedSum) -> None:
        self._sum, self._waits = ordered_sum, list[Wait]()
        self._go_on: Callable[[], Wait] | None = None

    def begin(self, partial: Mapping[Node, torch.Tensor]) -> None:
        """Begin the next sum, of this rank's `TreeSum.partial`."""
        self._end_first_half()
        self._go_on = self._sum.begin(partial, len(self._waits))

    def totals(self) -> list[torch.Tensor]:
        """Wait for all sums, and return them; at least one was begun."""
        self._end_first_half()
        return [wait() for wait in self._waits]

    def _end_first_half(self) -> None:
        if self._go_on:
            self._waits.append(self._go_on())


def _waited(wait: Wait) -> Wait:
    value = wait()
    return lambda: value
