"""Times of all-reduces and steps. Oracles: closed forms, steps followed by hand, random sampling of maxima."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from dataclasses import replace

import pytest

from allstep.commands.forecast.allreduce import (
    Cluster,
    Link,
    all_gather,
    hierarchical,
    host_memory,
    parameter_servers,
    ring,
    tree,
)
from allstep.commands.forecast.forecast import Machine, Workload, forecast, gradients, units
from allstep.commands.forecast.networks import known_networks, uniform
from allstep.commands.forecast.parameters import fitted
from allstep.commands.forecast.simulation import (
    NUM_PHASES,
    Fusion,
    Gradient,
    Unit,
    expected_largest,
    simulate,
    simulate_sharded,
)
from allstep.commands.forecast.site import Site

ALPHA, BETA = 1e-5, 1e9
ONE_NODE = Cluster(1024, Link(ALPHA, BETA), Link(math.nan, math.nan))
FLAT = Cluster(1, Link(0.0, math.inf), Link(ALPHA, BETA))
IN_MEMORY = Fusion(threshold=1e12, cycle=0.0)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 512, 100_000])
def test_ring_is_the_textbooks_formula(num_ranks):
    seconds = 2 * (num_ranks - 1) * ALPHA + 2 * (num_ranks - 1) / num_ranks * 1e8 / BETA
    assert ring(1e8, num_ranks, FLAT) == pytest.approx(seconds)
    if num_ranks <= ONE_NODE.ranks_per_node:
        assert ring(1e8, num_ranks, ONE_NODE) == pytest.approx(seconds)


def test_hops_and_crossings_of_the_other_algorithms():
    cluster = Cluster(8, Link(1e-6, 100e9), Link(1e-5, 10e9))
    # 32 nodes: 5 levels; a chain of 7 hops within a node; all data cross the link between nodes twice.
    assert tree(0, 256, cluster) == pytest.approx(2 * (5 * 1e-5 + 7 * 1e-6))
    assert tree(1e9, 256, cluster) - tree(0, 256, cluster) == pytest.approx(2 * 1e9 / 10e9)
    assert hierarchical(0, 256, cluster) == pytest.approx(2 * 7 * 1e-6 + 2 * 5 * 1e-5)
    sent = 2 * 7 / 8 * 1e9 / 100e9 + 2 * 31 / 32 * 1e9 / 10e9
    assert hierarchical(1e9, 256, cluster) - hierarchical(0, 256, cluster) == pytest.approx(sent)
    assert tree(1e9, 1, cluster) == hierarchical(1e9, 1, cluster) == 0


@pytest.mark.parametrize("contention", [0.0, 1.0])
def test_simulation_without_overlap_is_the_closed_form(contention):
    """All gradients are sent in one message at the end of backward, so nothing overlaps, whatever the contention."""
    step = simulate(1.0, [Gradient(2.0, 5e8), Gradient(2.0, 5e8)], lambda size: size / BETA, fusion=IN_MEMORY)
    assert (step.total, step.compute, step.communication) == (4.0, 3.0, 1.0)
    workload = Workload(uniform(25_000_000, 1), 32, 0.2, backward_share=1.0)
    slowing = replace(FLAT, inter=replace(FLAT.inter, contention=contention))
    found = forecast(workload, Machine(slowing, fusion=IN_MEMORY), 64)
    assert found.total == pytest.approx(found.closed_form)
    assert found.closed_form == pytest.approx(0.2 + ring(1e8, 64, FLAT))


def test_simulation_with_overlap_by_hand():
    """Two gradients at 1 s and 2 s of backward take 0.5 s each on the wire: the first is hidden, the second is not."""
    two = [Gradient(1.0, 1.0), Gradient(2.0, 1.0)]
    alone = Fusion(threshold=0, cycle=0.0)
    step = simulate(1.0, two, lambda _: 0.5, fusion=alone)
    assert (step.total, step.compute, step.communication) == (3.5, 3.0, 1.0)
    # Backward is paused during communication, as if nothing overlapped.
    assert simulate(1.0, two, lambda _: 0.5, fusion=alone, contention=1.0).total == 4.0
    # At half speed, backward gets 0.25 s of work done in 0.5 s.
    assert simulate(1.0, two, lambda _: 0.5, fusion=alone, contention=0.5).total == 3.75
    # The first takes 3 s; the second waits for it.
    assert simulate(1.0, two, lambda _: 3.0, fusion=alone).total == 8.0
    # The coordinator takes 0.8 s for each.
    assert simulate(1.0, two, lambda _: 0.5, fusion=alone, request=0.8).total == pytest.approx(4.3)


def test_fusion_packs_what_is_ready_up_to_the_threshold():
    ready_at_once = [Gradient(1.0, 10.0)] * 5
    for threshold, num_collectives in ((0, 5), (20, 3), (29, 3), (30, 2), (50, 1)):
        step = simulate(0.0, ready_at_once, lambda size: 1.0, fusion=Fusion(threshold, 0.0))
        assert (step.total, step.communication) == (1.0 + num_collectives, num_collectives)


def test_buckets_are_sent_when_full():
    """DDP's first bucket holds 1 MiB, the others as much as the flag says; the last one is sent partly filled."""
    mib = 2**20
    gradients_ = [Gradient(float(i), mib) for i in range(1, 7)]
    step = simulate(0.0, gradients_, lambda size: 0.1, fusion=Fusion(2 * mib, 0.0, buckets=True))
    assert (step.communication, step.total) == pytest.approx((4 * 0.1, 6.1))


def test_gradients_come_in_backward_order_and_take_their_share():
    network = known_networks()["vgg16"]
    found = gradients(network, 1.0, 2)
    sizes = [2 * layer.num_parameters for layer in reversed(network.layers)]
    assert [gradient.num_bytes for gradient in found] == sizes
    assert found[0].ready < 0.01 and found[-1].ready == 1.0  # fully connected layers compute little, and come first


@pytest.mark.parametrize("number", [2, 8, 64])
def test_the_slowest_of_many(number):
    """Oracle: random sampling."""
    chance = random.Random(0)
    drawn = statistics.fmean(max(chance.gauss() for _ in range(number)) for _ in range(4000))
    assert expected_largest(number) == pytest.approx(drawn, abs=0.05)
    assert expected_largest(1) == 0


def test_a_cycle_is_averaged_over_its_phases():
    """Gradients are ready at 2 and 3 s, and a thread waking every 0.7 s from any moment on sends each for 0.5 s."""
    found = simulate(1.0, [Gradient(1.0, 1.0), Gradient(2.0, 1.0)], lambda _: 0.5, fusion=Fusion(0, 0.7)).total
    ends = []
    for phase in range(NUM_PHASES):
        first = next(look for n in itertools.count() if (look := 1 + (phase + 0.5) / NUM_PHASES * 0.7 + 0.7 * n) >= 2)
        ends.append(next(look for n in itertools.count(1) if (look := first + 0.7 * n) >= 3) + 0.5)
    assert found == pytest.approx(statistics.fmean(ends))


def test_no_jumps():
    """A step 0.5 ms longer, or twice the ranks, changes little: cycles would add a whole one or none at the border."""
    machine = Site().machine(fitted().values)
    steps = [Workload(known_networks()["resnet50"], 32, (250 + 0.5 * number) / 1000) for number in range(100)]
    found = [forecast(workload, machine, 64).efficiency for workload in steps]
    assert max(abs(one - other) for one, other in itertools.pairwise(found)) < 0.001
    sizes = [forecast(steps[86], machine, 2**power).efficiency for power in range(15)]
    assert sizes == sorted(sizes, reverse=True)


def test_bytes_that_pass_host_memory_and_servers():
    cluster = Cluster(8, Link(0.0, 100e9), Link(0.0, 10e9), host_memory=1e9)
    assert host_memory(1e9, 8, cluster) == pytest.approx(2 * 7 / 8)  # copies at 1 GB/s, slower than any link
    slow = replace(cluster, inter=Link(1e-3, 1e8))
    assert host_memory(1e9, 16, slow) == pytest.approx(2 * 15 * 1e-3 + 2 * 0.5 * 1e9 / 1e8)  # half stays in its node
    within = 2 * 7 / 8 * 1e9 / 100e9
    assert parameter_servers(1e9, 8, cluster) == pytest.approx(within)
    assert parameter_servers(1e9, 32, cluster) == pytest.approx(within + 2 * 3 / 4 * 1e9 / 10e9)
    # Four nodes send to two servers, each of which receives twice what a node sends.
    assert parameter_servers(1e9, 32, replace(cluster, num_servers=2)) == pytest.approx(within + 2 * 2 * 1e9 / 10e9)
    assert host_memory(1e9, 1, cluster) == parameter_servers(1e9, 1, cluster) == all_gather(1e9, 1, cluster) == 0
    assert all_gather(1e9, 8, cluster) == pytest.approx(ring(1e9, 8, cluster) / 2)
    assert all_gather(1e9, 32, cluster) == pytest.approx(3 / 4 * 1e9 / 10e9)


def test_sharded_steps_by_hand():
    """Two units of 1 s forward and 2 s backward; gathering one takes 0.5 s, scattering one 0.25 s."""
    two = [Unit(1.0, 2.0, 1)] * 2
    step = simulate_sharded(two, lambda _: 0.5, lambda _: 0.25)
    # Seen are only the first gather, before anything computes, and the last scatter.
    assert (step.total, step.compute, step.communication) == (0.5 + 6 + 0.25, 6, 3 * 0.5 + 2 * 0.25)
    assert simulate_sharded(two, lambda _: 0.5, lambda _: 0.25, overlap=False).total == 8
    # Three seconds of gathering: only units that are gathered compute; the second waits 2 s, and so on.
    assert simulate_sharded(two, lambda _: 3.0, lambda _: 0.0).total == 3 + 3 + 1 + 3 + 2
    # Computing stops while the second unit is gathered (0.5 s) and again (0.5 s), and during the first scatter.
    assert simulate_sharded(two, lambda _: 0.5, lambda _: 0.25, contention=1.0).total == 8


def test_units_have_all_parameters_and_all_time():
    network = known_networks()["llama-8b"]
    found = units(network, 3.0, 2 / 3)
    assert sum(unit.num_parameters for unit in found) == network.num_parameters == 8_030_261_248
    assert sum(unit.forward for unit in found) == pytest.approx(1) and sum(
        unit.backward for unit in found
    ) == pytest.approx(2)


def test_patterns_of_a_step_by_hand():
    """One layer of 25 million parameters: 0.1 GB, which take nearly 0.2 s on 64 ranks at 1 GB/s; a step takes 0.3 s."""
    workload, machine = Workload(uniform(25_000_000, 1), 32, 0.3), Machine(FLAT, fusion=IN_MEMORY)
    sent = ring(1e8, 64, FLAT)
    assert forecast(workload, machine, 64).total == pytest.approx(0.3 + sent)
    assert forecast(workload, replace(machine, wire_bytes=2), 64).total == pytest.approx(0.3 + ring(5e7, 64, FLAT))
    # Four passes send once; the optimizer's part comes after the all-reduce, and is not slowed by jitter.
    assert forecast(replace(workload, passes=4), machine, 64).total == pytest.approx(0.3 + sent)
    optimizer = replace(workload, optimizer_seconds=0.1)
    assert forecast(optimizer, machine, 64).total == pytest.approx(0.3 + sent)
    assert forecast(replace(optimizer, jitter=0.1), machine, 64).total == pytest.approx(
        0.3 + sent + 0.2 * 0.1 * expected_largest(64)
    )
    # A sharded rank gathers before it computes and scatters afterwards, and updates its own shard only.
    sharded = forecast(optimizer, replace(machine, gather_bytes=2), 64)
    moved = all_gather(5e7, 64, FLAT) + all_gather(1e8, 64, FLAT)
    assert sharded.total == pytest.approx(0.2 + moved + 0.1 / 64)
    assert forecast(replace(workload, passes=2), replace(machine, gather_bytes=2), 64).total == pytest.approx(
        0.3 + 2 * moved
    )


def test_less_is_hidden_without_overlap_or_behind_fewer_passes():
    workload = Workload(uniform(25_000_000, 10), 32, 0.3)
    machine = Machine(FLAT, fusion=Fusion(1, 0.0))
    hidden = forecast(workload, machine, 64)
    apart = forecast(workload, replace(machine, overlap=False, fusion=IN_MEMORY), 64)
    assert apart.total == pytest.approx(apart.closed_form) and hidden.total < apart.total
    assert hidden.total < forecast(replace(workload, passes=4), machine, 64).total < apart.total


@pytest.mark.parametrize("sharded", [0, 2])
def test_a_baseline_of_several_ranks_is_what_was_measured(sharded):
    workload = Workload(known_networks()["bert-base"], 32, 0.25, jitter=0.01, baseline_ranks=8)
    machine = replace(Site().machine(fitted().values), gather_bytes=sharded)
    assert forecast(workload, machine, 8).efficiency == pytest.approx(1, abs=1e-3)
    assert forecast(workload, machine, 16).efficiency < 1 < forecast(workload, machine, 1).efficiency
