"""Naming of causes. Oracles: machines with one weakness; assumed values, which must not be named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allstep.commands.forecast.allreduce import Cluster, Link
from allstep.commands.forecast.causes import CAUSES, UNKNOWN, _changes, bottleneck, what_helps
from allstep.commands.forecast.forecast import Machine, Workload, forecast
from allstep.commands.forecast.networks import known_networks
from allstep.commands.forecast.parameters import fitted
from allstep.commands.forecast.site import Site


def cost(workload, machine, num_ranks, known=CAUSES):
    return bottleneck(workload, machine, forecast(workload, machine, num_ranks), known)


def test_what_limits_and_what_helps():
    slow_link = Machine(Cluster(8, Link(1e-6, 100e9), Link(1e-6, 1e8)))
    workload = Workload(known_networks()["vgg16"], 32, 0.2)
    assert cost(workload, slow_link, 64)[0] == "bandwidth"
    starved = Machine(Cluster(8, Link(1e-6, 100e9), Link(1e-6, 100e9)), storage_input=1000.0)
    found = forecast(workload, starved, 64)
    assert found.images_per_second == pytest.approx(1000) and bottleneck(workload, starved, found)[0] == "input"
    assert what_helps(workload, starved, found) == ("twice the input rate", pytest.approx(2 * found.efficiency))
    far = Machine(Cluster(1, Link(0, 1e12), Link(1e-4, 1e12)))
    found = forecast(workload, far, 4096)
    assert bottleneck(workload, far, found)[0] == "latency" and "all-reduce" in what_helps(workload, far, found)[0]
    jittery = Workload(workload.network, 32, 0.2, jitter=0.1)
    assert cost(jittery, Machine(Cluster(8, Link(0, 1e12), Link(0, 1e12))), 64)[0] == "stragglers"


@pytest.mark.parametrize("num_ranks", [2, 8, 64, 4096])
@pytest.mark.parametrize("network", ["resnet50", "vgg16", "bert-large"])
def test_assumed_values_are_never_named(network, num_ranks):
    values = fitted().values
    workload = Workload(known_networks()[network], 32, 0.2, jitter=values.jitter)
    for site in (Site(), Site(inter_gbit=10), Site(link="tcp", overlap=False), Site(intra_gbit=80, ranks_per_node=4)):
        machine = site.machine(values)
        found = forecast(workload, machine, num_ranks)
        name, share = bottleneck(workload, machine, found, known=())
        assert name in (UNKNOWN, "computing")
        assert 0 <= share <= 1 - 0.2 / found.total + 1e-9
        changes = " ".join(name for name, _ in _changes(workload, machine, known=()))
        assert not any(word in changes for word in ("jitter", "bandwidth", "latency"))


def test_what_is_known_is_named_if_it_costs_more_than_all_that_is_assumed():
    machine = Machine(Cluster(8, Link(0, 1e12), Link(0, 1e12)), crowding=1.2)
    workload = Workload(known_networks()["resnet50"], 32, 0.2, jitter=0.03)
    assert cost(workload, machine, 64, known={"stragglers"})[0] == UNKNOWN
    assert cost(workload, replace(machine, crowding=1.01), 64, known={"stragglers"})[0] == "stragglers"
    assert cost(workload, machine, 64, known=set(CAUSES))[0] == "crowded nodes"
