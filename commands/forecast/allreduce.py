"""Links between ranks, and the time of an all-reduce over them, in closed form, for each algorithm.

An all-reduce consists of a number of hops, which cost latency, and of the times that the message crosses the slowest
link.
"""

import math
from collections.abc import Callable
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


AllReduce = Callable[[float, int, Cluster], float]


def ring(num_bytes: float, num_ranks: int, cluster: Cluster) -> float:
    """Return the seconds of a ring: 2(N-1) latency + 2(N-1)/N S/B (Patarasuk and Yuan 2009, section 3).

    All ranks send at once, 2(N-1) times, so the slowest link paces every turn: one between nodes, if there is one.
    """
    if num_ranks == 1:
        return 0.0
    num_turns = 2 * (num_ranks - 1)
    links = (cluster.intra, cluster.inter) if cluster.num_nodes(num_ranks) > 1 else (cluster.intra,)
    return max(num_turns * (link.latency + num_bytes / num_ranks / link.bandwidth) for link in links)


def tree(num_bytes: float, num_ranks: int, cluster: Cluster) -> float:
    """Return the seconds of a double binary tree over nodes and a chain in each, as in NCCL 2.4.

    Up and down, the message crosses log2 M links between nodes and the chain's k-1 links in a node, and every link
    carries the message twice (Sanders, Speck and Traeff 2009).
    """
    if num_ranks == 1:
        return 0.0
    num_nodes = cluster.num_nodes(num_ranks)
    per_node = cluster.ranks_on_node(num_ranks)
    hops_between, hops_within = math.ceil(math.log2(num_nodes)), per_node - 1
    bandwidth = min(
        cluster.intra.bandwidth if hops_within else math.inf, cluster.inter.bandwidth if hops_between else math.inf
    )
    latency = hops_between * cluster.inter.latency + hops_within * cluster.intra.latency
    return 2 * latency + 2 * num_bytes / bandwidth


def hierarchical(num_bytes: float, num_ranks: int, cluster: Cluster) -> float:
    """Return the seconds of reduce-scatter in nodes, recursive halving and doubling between them, all-gather in nodes.

    Horovod does this under HOROVOD_HIERARCHICAL_ALLREDUCE, and Goyal et al. 2017 did it (section 4.1); halving and
    doubling takes 2 log2 M hops and 2(M-1)/M S/B (Thakur, Rabenseifner and Gropp 2005).
    """
    if num_ranks == 1:
        return 0.0
    num_nodes = cluster.num_nodes(num_ranks)
    hops = 2 * math.ceil(math.log2(num_nodes))
    crossings = 2 * (num_nodes - 1) / num_nodes
    within = _within_nodes(num_bytes, num_ranks, cluster)
    return within + hops * cluster.inter.latency + crossings * num_bytes / cluster.inter.bandwidth


def _within_nodes(num_bytes: float, num_ranks: int, cluster: Cluster) -> float:
    """Return the seconds of a reduce-scatter and an all-gather in each node."""
    per_node = cluster.ranks_on_node(num_ranks)
    return 2 * (per_node - 1) * (cluster.intra.latency + num_bytes / per_node / cluster.intra.bandwidth)


def host_memory(num_bytes: float, num_ranks: int, cluster: Cluster) -> float:
    """Return the seconds of a ring over buffers in host memory, as MPI without GPU support runs it.

    Every byte is copied from the GPU, reduced by a core and copied back, at the cluster's `host_memory`, or passes the
    link between nodes, whichever is slower.
    """
    if num_ranks == 1:
        return 0.0
    num_nodes = cluster.num_nodes(num_ranks)
    copied = (num_ranks - 1) / num_ranks / cluster.host_memory
    sent = (num_nodes - 1) / num_nodes / cluster.inter.bandwidth if num_nodes > 1 else 0.0
    return 2 * (num_ranks - 1) * cluster.slowest(num_ranks).latency + 2 * num_bytes * max(copied, sent)


def parameter_servers(num_bytes: float, num_ranks: int, cluster: Cluster) -> float:
    """Return the seconds in which nodes send sums of gradients to servers and fetch weights (Li et al. 2014).

    The parameters are divided equally among the servers. A node adds its ranks' gradients first. A server next to the
    ranks of each node leaves 1/M of the bytes in its node; dedicated servers receive from all nodes.
    """
    if num_ranks == 1 and not cluster.num_servers:
        return 0.0
    num_nodes = cluster.num_nodes(num_ranks)
    within = _within_nodes(num_bytes, num_ranks, cluster)
    if cluster.num_servers:
        crossings = 2 * max(1.0, num_nodes / cluster.num_servers)
    elif num_nodes == 1:
        return within
    else:
        crossings = 2 * (num_nodes - 1) / num_nodes
    return within + 2 * cluster.inter.latency + crossings * num_bytes / cluster.inter.bandwidth


def all_gather(num_bytes: float, num_ranks: int, cluster: Cluster) -> float:
    """Return the seconds until each rank has all shards of `num_bytes`, or of the reduce-scatter that inverts it.

    Half of a ring's all-reduce: links in nodes and between nodes work at once, and the slower one decides.
    """
    if num_ranks == 1:
        return 0.0
    num_nodes = cluster.num_nodes(num_ranks)
    per_node = cluster.ranks_on_node(num_ranks)
    latency = (per_node - 1) * cluster.intra.latency
    seconds = (num_ranks - 1) / num_ranks * num_bytes / cluster.intra.bandwidth if per_node > 1 else 0.0
    if num_nodes > 1:
        latency += (num_nodes - 1) * cluster.inter.latency
        seconds = max(seconds, (num_nodes - 1) / num_nodes * num_bytes / cluster.inter.bandwidth)
    return latency + seconds


DIRECT: dict[str, AllReduce] = {"ring": ring, "tree": tree, "hierarchical": hierarchical}
"""Algorithms between the memories of GPUs, of which libraries choose the fastest."""
ALGORITHMS: dict[str, AllReduce] = {**DIRECT, "host-memory": host_memory, "parameter-servers": parameter_servers}
