"""Cost of messages between ranks other than gradients, as it grows with the number of ranks.

The costs of heartbeats are fitted to the measurements in docs/measurements/control-plane.md, within 15 % of each share
from 64 to 4,096 ranks; beyond, they are extrapolated linearly.
"""

import math
from dataclasses import dataclass

from allstep.commands.forecast.allreduce import Cluster
from allstep.commands.forecast.forecast import Workload
from allstep.commands.forecast.networks import BYTES_PER_PARAMETER
from allstep.common.watch.relay import BEAT_SECONDS, RELAYED_FROM

# Seconds of rank 0's core per second: for the monitor's rounds, per connection, and per rank's heartbeat in a message.
_ROUNDS, _CONNECTION, _BEAT = 0.004, 14e-6, 4e-6
# Seconds that each connection adds until a stop is agreed.
_STOP = 0.3e-3


@dataclass(frozen=True)
class ControlPlane:
    """Cost of a job's control plane, in addition to the all-reduce of gradients."""

    num_connections: int
    """Connections of rank 0: to the other ranks or, in large jobs, to the other hosts and to the ranks of its host."""
    beats: float
    """Seconds of rank 0's core per second for receiving heartbeats. If no core is free for that, rank 0 computes more
    slowly by this share, and all others wait for it."""
    replica_check: float
    """Seconds for comparing the checksums of all ranks, once per epoch."""
    replica_check_share: float
    """Share of that in the time of an epoch's steps; 0 if the number of samples is not given."""
    stop: float
    """Seconds from a notice to one rank until all ranks know where to stop."""
    broadcast: float
    """Seconds until all ranks have the state of a resumed run from rank 0."""

    @property
    def share(self) -> float:
        """Upper limit of the time added to a step, over the step's time."""
        return self.beats + self.replica_check_share

    @property
    def costliest(self) -> str:
        """Name of the part that adds most to a step."""
        return "beats" if self.beats >= self.replica_check_share else "replica check"


def control_plane(
    workload: Workload, cluster: Cluster, num_ranks: int, *, step_seconds: float, samples: int | None = None
) -> ControlPlane:
    """Return the cost on `num_ranks`, N, with T tensors and S bytes of weights and momentum.

    - beats, per second: 0.4 % + 14 us connections + 4 us (N - 1);
    - replica check: all-gather of 8 T bytes per rank by a ring, (N - 1) (latency + 8 T / bandwidth);
    - stop: the second for which rank 0's agent sleeps, and 0.3 ms per connection;
    - broadcast: scatter and all-gather, (log2 N + N - 1) latency + 2 (N - 1) / N S / bandwidth (Thakur, Rabenseifner
      and Gropp 2005, section 4.3).

    `step_seconds` is the time of a step on `num_ranks`, `samples` the number of samples in an epoch.
    """
    if num_ranks == 1:
        return ControlPlane(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    others, num_nodes = num_ranks - 1, cluster.num_nodes(num_ranks)
    connections = others
    if num_ranks >= RELAYED_FROM:
        connections = cluster.ranks_on_node(num_ranks) - 1 + num_nodes - 1
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
