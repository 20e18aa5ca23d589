"""Forecast of step time, efficiency and bottlenecks on any number of ranks, from one rank's step and the links."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from allstep.commands.forecast.allreduce import ALGORITHMS
from allstep.commands.forecast.links import Cluster, Link
from allstep.commands.forecast.networks import BYTES_PER_PARAMETER, Network
from allstep.commands.forecast.simulation import Fusion, Gradient, SimulatedStep, simulate
from allstep.commands.forecast.stragglers import slowdown

BEST = "best"
NOTICED = 0.01
"""Share of the step time from which a bottleneck is reported."""


@dataclass(frozen=True)
class Workload:
    """Work of one rank in a step."""

    network: Network
    batch_size: int
    """Samples per rank and step, for any number of ranks (weak scaling)."""
    step_seconds: float
    """Mean step time of a single rank."""
    backward_share: float = 2 / 3
    """Backward's share of the step: two matrix products for each one of forward."""
    jitter: float = 0.0
    """Standard deviation of a rank's step time over its mean."""


@dataclass(frozen=True)
class Machine:
    """The machine of the ranks, and how they all-reduce gradients."""

    cluster: Cluster
    algorithm: str = "ring"
    """Key in ALGORITHMS, or `best`: the fastest one for each message."""
    fusion: Fusion = Fusion()
    wire_bytes: int = BYTES_PER_PARAMETER
    """Bytes sent for a parameter's gradient: 4, or 2 if compressed."""
    contention: float = 0.0
    """Share of its speed that backward loses during all-reduces; see `simulate`."""
    request: float = 0.0
    """Seconds that the coordinator takes for one rank's request for one gradient."""
    crowding: float = 1.0
    """Step time of a rank while all ranks of its node compute, over its time on an idle node, without communication."""
    node_input: float = math.inf
    """Samples per second that a node can read and prepare."""
    storage_input: float = math.inf
    """Samples per second that the storage delivers to all nodes together."""

    def all_reduce(self, num_bytes: float, num_ranks: int) -> float:
        """Return the seconds of an all-reduce over `num_ranks`."""
        if self.algorithm != BEST:
            return ALGORITHMS[self.algorithm](num_bytes, num_ranks, self.cluster)
        return min(seconds(num_bytes, num_ranks, self.cluster) for seconds in ALGORITHMS.values())


@dataclass(frozen=True)
class Forecast:
    """Forecast of a step on `num_ranks`, in seconds."""

    num_ranks: int
    total: float
    efficiency: float
    """Step time of one rank over `total`."""
    images_per_second: float
    """Speed of all ranks together."""
    step: SimulatedStep
    """The step without limits of input."""
    closed_form: float
    """Computing, then one all-reduce of everything: `total` without overlap, fusion and negotiation."""


def forecast(workload: Workload, machine: Machine, num_ranks: int) -> Forecast:
    """Forecast a step on `num_ranks`."""
    cluster = machine.cluster
    local = min(num_ranks, cluster.ranks_per_node)
    crowd = 1 + (machine.crowding - 1) * (local - 1) / max(1, cluster.ranks_per_node - 1)
    compute = workload.step_seconds * slowdown(num_ranks, workload.jitter) * crowd
    backward = compute * workload.backward_share
    if num_ranks == 1:
        step, closed_form = SimulatedStep(compute, compute, 0.0), compute
    else:
        step = simulate(
            compute - backward,
            gradients(workload.network, backward, machine.wire_bytes),
            lambda num_bytes: machine.all_reduce(num_bytes, num_ranks),
            fusion=machine.fusion,
            contention=machine.contention,
            request=machine.request * num_ranks,
        )
        closed_form = compute + machine.all_reduce(workload.network.num_parameters * machine.wire_bytes, num_ranks)
    wait_for_input = workload.batch_size * max(local / machine.node_input, num_ranks / machine.storage_input)
    total = max(step.total, wait_for_input)
    return Forecast(
        num_ranks,
        total,
        workload.step_seconds / total,
        num_ranks * workload.batch_size / total,
        step,
        max(closed_form, wait_for_input),
    )


def gradients(network: Network, backward: float, wire_bytes: int) -> list[Gradient]:
    """Return the gradients of a network in the order of a backward pass of `backward` seconds.

    A layer's share of the time is its share of the multiplications.
    """
    whole = sum(layer.multiplications for layer in network.layers)
    ready, found = 0.0, []
    for layer in reversed(network.layers):
        ready += backward * layer.multiplications / whole
        found.append(Gradient(ready, layer.num_parameters * wire_bytes, layer.num_tensors))
    found[-1] = replace(found[-1], ready=backward)  # free of rounding errors
    return found


def bottleneck(workload: Workload, machine: Machine, num_ranks: int) -> tuple[str, float]:
    """Return what costs most at this size, and the share of the step time that would be saved if it were perfect."""
    total = forecast(workload, machine, num_ranks).total
    name, gain = max(
        ((name, 1 - forecast(*changed, num_ranks).total / total) for name, changed in _perfect(workload, machine)),
        key=lambda found: found[1],
    )
    return (name, gain) if gain > NOTICED else ("computing", 0.0)


def what_helps(workload: Workload, machine: Machine, num_ranks: int) -> tuple[str, float] | None:
    """Return the change that gains most, and the efficiency with it; None if the gain is less than NOTICED."""
    efficiency = forecast(workload, machine, num_ranks).efficiency
    name, changed = max(
        ((name, forecast(*changed, num_ranks).efficiency) for name, changed in _changes(workload, machine)),
        key=lambda found: found[1],
    )
    return (name, changed) if changed - efficiency > NOTICED else None


def _perfect(workload: Workload, machine: Machine) -> Iterator[tuple[str, tuple[Workload, Machine]]]:
    """Yield workload and machine with each resource in turn unlimited."""
    unlimited = replace(machine, node_input=math.inf, storage_input=math.inf)
    yield "input", (workload, unlimited)
    yield "bandwidth", (workload, _with_links(machine, bandwidth=math.inf))
    yield "latency", (workload, _with_links(machine, latency=0.0))
    yield "negotiation", (workload, replace(machine, request=0.0, fusion=replace(machine.fusion, cycle=0.0)))
    yield "stragglers", (replace(workload, jitter=0.0), machine)
    yield "crowded nodes", (workload, replace(machine, crowding=1.0))


def _changes(workload: Workload, machine: Machine) -> Iterator[tuple[str, tuple[Workload, Machine]]]:
    """Yield the changes that a user could make."""
    twice = replace(workload, batch_size=2 * workload.batch_size, step_seconds=2 * workload.step_seconds)
    yield "twice the batch a rank", (twice, machine)
    yield "half the jitter", (replace(workload, jitter=workload.jitter / 2), machine)
    yield "twice the bandwidth", (workload, _with_links(machine, bandwidth=2.0))
    yield "half the latency", (workload, _with_links(machine, latency=0.5))
    if machine.wire_bytes > 2:
        yield "fp16 gradients", (workload, replace(machine, wire_bytes=2))
    for name in ALGORITHMS:
        if machine.algorithm not in (name, BEST):
            yield f"{name} all-reduce", (workload, replace(machine, algorithm=name))
    faster = replace(machine, node_input=2 * machine.node_input, storage_input=2 * machine.storage_input)
    yield "twice the input rate", (workload, faster)
    yield "half the requests (a cache of responses)", (workload, replace(machine, request=machine.request / 2))


def _with_links(machine: Machine, *, latency: float = 1.0, bandwidth: float = 1.0) -> Machine:
    """Return the machine with the links' latency and bandwidth multiplied by these factors."""
    old = machine.cluster
    links = (Link(link.latency * latency, link.bandwidth * bandwidth) for link in (old.intra, old.inter))
    return replace(machine, cluster=Cluster(old.ranks_per_node, *links))
