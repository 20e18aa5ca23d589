"""Links between ranks: equal nodes, one kind of link in a node and one between nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A connection in the alpha-beta model (Hockney 1994): a message of S bytes takes latency + S / bandwidth."""

    latency: float
    """Seconds for the first byte, software included."""
    bandwidth: float
    """Bytes per second in one direction that a long message reaches: the measured value, not the nominal one."""
    contention: float = 0.0
    """Share of its speed that backward loses while this link carries an all-reduce: 0 if the network hardware does the
    work, 1 for ranks on CPUs that reduce themselves."""


@dataclass(frozen=True)
class Cluster:
    """Nodes with the same number of ranks, which share the node's link to the other nodes."""

    ranks_per_node: int
    intra: Link
    """Link between two ranks of a node."""
    inter: Link
    """Link between two nodes; all ranks of a node share it."""
    host_memory: float = math.inf
    """Bytes per second that a rank copies and reduces in host memory, for gradients that are staged there."""
    num_servers: int = 0
    """Number of dedicated parameter servers; 0: each node has one next to its ranks."""

    def num_nodes(self, num_ranks: int) -> int:
        return -(-num_ranks // self.ranks_per_node)

    def ranks_on_node(self, num_ranks: int) -> int:
        """Return how many of `num_ranks` are on a full node, or on the only one."""
        return min(num_ranks, self.ranks_per_node)

    def slowest(self, num_ranks: int) -> Link:
        """Return the link that decides how communication disturbs computing: one between nodes, if there is one."""
        return self.inter if self.num_nodes(num_ranks) > 1 else self.intra
