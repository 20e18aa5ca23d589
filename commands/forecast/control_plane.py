"""What the ranks say to each other beside gradients, as it grows with their number.

The costs of the watch are fitted to what `benchmarks/control_plane.py` has measured (docs/scale.md), within 15 %
of each share from 64 to 4,096 ranks; beyond, they are straight lines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from allstep.commands.forecast.forecast import Workload
from allstep.commands.forecast.links import Cluster
from allstep.commands.forecast.networks import BYTES_PER_PARAMETER
from allstep.common.watch.relay import BEAT_SECONDS, RELAYED_FROM

# Of a core of rank 0 in each second: the monitor's own rounds, a connection, a rank's beat in a message.
_ROUNDS, _CONNECTION, _BEAT = 0.004, 14e-6, 4e-6
# Seconds that each connection adds until a stop is agreed.
_STOP = 0.3e-3


@dataclass(frozen=True)
class ControlPlane:
    """What it costs a job, beside the all-reduce of its gradients."""

    num_connections: int
    """Of rank 0: to the other ranks or, in large jobs, to the other hosts and to the ranks of its own."""
    beats: float
    """Seconds of a core of rank 0 in each second, for hearing where the ranks are. Where no core is free for that,
    rank 0 computes by as much more slowly, and all others wait for it."""
    replica_check: float
    """Seconds for comparing the checksums of all ranks, once an epoch."""
    replica_check_share: float
    """Of the time of an epoch's steps; 0 where nobody has said how many samples an epoch has."""
    stop: float
    """Seconds from a notice to one rank until all know where to stop."""
    broadcast: float
    """Seconds in which all receive the state of a resumed run from rank 0."""

    @property
    def share(self) -> float:
        """What it adds to a step, at most, over the step's time."""
        return self.beats + self.replica_check_share

    @property
    def costliest(self) -> str:
        """The part that adds most to a step."""
        return "beats" if self.beats >= self.replica_check_share else "replica check"


def control_plane(
    workload: Workload, cluster: Cluster, num_ranks: int, *, step_seconds: float, samples: int | None = None
) -> ControlPlane:
    """The cost on `num_ranks`, N, with T tensors and S bytes of weights and momentum.

    - beats: 0.4 % + 14 us connections + 4 us (N - 1), a second;
    - replica check: all-gather of 8 T bytes a rank by a ring, (N - 1) (latency + 8 T / bandwidth);
    - stop: the second for which rank 0's agent sleeps, and 0.3 ms a connection;
    - broadcast: scatter and all-gather, (log2 N + N - 1) latency + 2 (N - 1) / N S / bandwidth (Thakur, Rabenseifner
      and Gropp 2005, section 4.3).

    Args:
        step_seconds: of a step on `num_ranks`.
        samples: in an epoch.
    """
    if num_ranks == 1:
        return ControlPlane(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    others, num_nodes = num_ranks - 1, cluster.num_nodes(num_ranks)
    connections = others
    if num_ranks >= RELAYED_FROM:
        connections = min(num_ranks, cluster.ranks_per_node) - 1 + num_nodes - 1
    links = (cluster.intra, cluster.inter) if num_nodes > 1 else (cluster.intra,)  # the slower paces every turn
    digest_bytes = 8 * sum(layer.num_tensors for layer in workload.network.layers)
    state_bytes = 2 * BYTES_PER_PARAMETER * workload.network.num_parameters
    replica_check = max(others * (link.latency + digest_bytes / link.bandwidth) for link in links)
    steps = math.ceil(samples / (num_ranks * workload.batch_size)) if samples else math.inf
    return ControlPlane(
        num_connections=connections,
        beats=_ROUNDS + _CONNECTION * connections + _BEAT * others,
        replica_check=replica_check,
        replica_check_share=replica_check / (steps * step_seconds),
        stop=BEAT_SECONDS + _STOP * connections,
        broadcast=max(
            (math.log2(num_ranks) + others) * link.latency + 2 * others / num_ranks * state_bytes / link.bandwidth
            for link in links
        ),
    )
