"""The sum of the slices' vectors over all ranks in one fixed order; `common/slices.py` says in which.

An all-reduce adds up in an order of its own, which changes with the number of ranks. Where a trial shows that it is
the tree's (two ranks have no other, and Open MPI's halving and doubling has it on four), that is what is used. Else
each rank gets one part of everybody's sums (all-to-all), adds them up by the tree, and all of them get all parts
(all-gather): of a vector of M bytes a rank that has one sum sends 2 (N - 1) / N M bytes to the N - 1 others, as in a
ring.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from allstep.common.slices import Node, TreeSum, adds_in_order, own_nodes


class Exchange(Protocol):
    """How tensors of one axis travel between ranks."""

    @property
    def keeps_order(self) -> bool:
        """Whether the order of `all_reduce` depends on the size of a vector alone."""
        ...

    def all_to_all(self, sent: torch.Tensor, received_sizes: list[int]) -> torch.Tensor:
        """What each rank has sent to this one, in the order of ranks.

        Args:
            sent: to rank 0, rank 1, ..., as many elements to each.
        """
        ...

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """The parts of all ranks, of one size, in the order of ranks."""
        ...

    def all_reduce(self, vector: torch.Tensor) -> torch.Tensor:
        """The sum of one vector of each rank, in an order of its own."""
        ...


class OrderedSum:
    """A sum over all slices of all ranks; every rank gets the same bits, on any number of them."""

    num_parts = 1
    """Of how many parts the vectors are made, of whose sums a rank gets its own."""

    def __init__(self, num_slices: int, rank: int, world_size: int, exchange: Exchange | None = None) -> None:
        """`exchange` is for more than one rank."""
        self.num_slices, self._rank, self._world_size, self._exchange = num_slices, rank, world_size, exchange
        self._nodes = [own_nodes(other, world_size, num_slices) for other in range(world_size)]
        self.reduces_in_order: bool | None = None
        """Whether an all-reduce is what adds up; known from the first sum of several ranks on."""

    def padding(self, size: int) -> int:
        """How many elements a vector of `size` lacks to be cut into parts of one size for all ranks."""
        return -size % self._world_size

    def __call__(self, partial: Mapping[Node, torch.Tensor]) -> torch.Tensor:
        """The sum over all slices.

        Args:
            partial: this rank's `TreeSum.partial`: vectors of one size, with padding.
        """
        if self._exchange is None:
            return partial[0, self.num_slices]
        own = partial[self._nodes[self._rank][0]]
        if self.reduces_in_order is None:
            self.reduces_in_order = self._try_order(self._exchange, own.numel())
        if self.reduces_in_order:
            return self._exchange.all_reduce(own)
        return self._exchange.all_gather(self._own_part(self._exchange, partial))

    def _try_order(self, exchange: Exchange, size: int) -> bool:
        """Whether an all-reduce of `size` elements adds them up in the order of the tree; all ranks call it."""
        if self._world_size == 2:  # each has one half of the tree, and a sum of two numbers has but one order
            return True
        if not exchange.keeps_order:
            return False
        return adds_in_order(
            lambda array: exchange.all_reduce(torch.from_numpy(array)).numpy(),
            size,
            rank=self._rank,
            world_size=self._world_size,
            num_slices=self.num_slices,
        )

    def _own_part(self, exchange: Exchange, partial: Mapping[Node, torch.Tensor]) -> torch.Tensor:
        own = [partial[node] for node in self._nodes[self._rank]]
        part_size = own[0].numel() // self._world_size
        # To each rank its part of all of this one's sums.
        sent = own[0] if len(own) == 1 else torch.stack([one.view(self._world_size, -1) for one in own], 1).flatten()
        received = exchange.all_to_all(sent, [len(nodes) * part_size for nodes in self._nodes])
        nodes = list(itertools.chain.from_iterable(self._nodes))
        return _add_up(nodes, received.split(part_size), self.num_slices)


class OrderedScatter(OrderedSum):
    """The same for ranks of which each needs a part of the sum alone: the all-gather falls away."""

    def __init__(self, num_slices: int, rank: int, world_size: int, exchange: Exchange | None = None) -> None:
        super().__init__(num_slices, rank, world_size, exchange)
        self.num_parts = world_size

    def __call__(self, partial: Mapping[Node, torch.Tensor]) -> torch.Tensor:
        """This rank's part of the sum, whose parts are of one size and in the order of ranks."""
        if self._exchange is None:
            return partial[0, self.num_slices]
        return self._own_part(self._exchange, partial)


def _add_up(nodes: Sequence[Node], parts: Sequence[torch.Tensor], num_slices: int) -> torch.Tensor:
    sums: TreeSum[torch.Tensor] = TreeSum(num_slices)
    for node, part in zip(nodes, parts, strict=True):
        sums.add(node, part)
    return sums.total
