"""Links between ranks: equal nodes, one kind of link in a node and one between nodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A connection in the alpha-beta model (Hockney 1994): a message of S bytes takes latency + S / bandwidth."""

    latency: float
    """Seconds for the first byte, software included."""
    bandwidth: float
    """Bytes per second in one direction that a long message reaches: the measured value, not the nominal one."""


@dataclass(frozen=True)
class Cluster:
    """Nodes with the same number of ranks, which share the node's link to the other nodes."""

    ranks_per_node: int
    intra: Link
    """Link between two ranks of a node."""
    inter: Link
    """Link between two nodes; all ranks of a node share it."""

    def num_nodes(self, num_ranks: int) -> int:
        return -(-num_ranks // self.ranks_per_node)
