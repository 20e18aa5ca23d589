"""Cost of the control plane. Oracles: the table in docs/measurements/control-plane.md, and a ring followed by hand."""

from __future__ import annotations

import math

import pytest

from allstep.commands.forecast.allreduce import Cluster, Link
from allstep.commands.forecast.control_plane import control_plane
from allstep.commands.forecast.forecast import Workload
from allstep.commands.forecast.networks import uniform

FLAT = Cluster(1, Link(0.0, math.inf), Link(1e-5, 1e9))


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_host", "connections", "percent"),
    [(64, 64, 63, 0.6), (256, 8, 38, 0.5), (1024, 8, 134, 1.1), (4096, 8, 518, 2.7), (4096, 4096, 4095, 7.8)],
)
def test_the_watch_costs_what_was_measured(num_ranks, ranks_per_host, connections, percent):
    """One host of 4,096 ranks stands for a connection per rank."""
    cluster = Cluster(ranks_per_host, Link(0.0, math.inf), Link(0.0, math.inf))
    found = control_plane(Workload(uniform(1000, 1), 32, 0.2), cluster, num_ranks, step_seconds=0.2)
    assert found.num_connections == connections
    assert 100 * found.beats == pytest.approx(percent, rel=0.15)
    assert found.stop <= (2.3 if connections == 4095 else 1.2)


def test_the_replica_check_and_a_resumed_state_by_hand():
    """100 tensors of 8 bytes from each of 1,024 other ranks, at 1 GB/s and 10 us; 8 MB of state twice over a link."""
    workload = Workload(uniform(1_000_000, 50), 32, 0.2)
    found = control_plane(workload, FLAT, 1025, step_seconds=0.2, samples=1025 * 32 * 10)
    assert found.replica_check == pytest.approx(1024 * (1e-5 + 800 / 1e9))
    assert found.replica_check_share == pytest.approx(found.replica_check / 2.0)  # of ten steps
    assert found.broadcast == pytest.approx((math.log2(1025) + 1024) * 1e-5 + 2 * 1024 / 1025 * 8e6 / 1e9)
    assert found.costliest == "beats" and found.share == found.beats + found.replica_check_share
    alone = control_plane(workload, FLAT, 1, step_seconds=0.2, samples=1)
    assert (alone.num_connections, alone.share, alone.stop) == (0, 0, 0)
