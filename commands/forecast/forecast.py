"""Forecast of step time and efficiency on any number of ranks, from one rank's step and the links."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from functools import partial

from allstep.commands.forecast import simulation
from allstep.commands.forecast.allreduce import ALGORITHMS, DIRECT, Cluster, all_gather
from allstep.commands.forecast.networks import BYTES_PER_PARAMETER, Network
from allstep.commands.forecast.parameters import Parameters
from allstep.commands.forecast.simulation import Fusion, Gradient, SimulatedStep, Unit

BEST = "best"
_MAX_ITERATIONS = 10
_BASELINE_ERROR = 1e-4
"""Error of the baseline's step time, as a share."""


@dataclass(frozen=True)
class Workload:
    """Work of one rank in a step."""

    network: Network
    batch_size: int
    """Samples per rank and step, for any number of ranks (weak scaling)."""
    step_seconds: float
    """Mean step time of a single rank, or of `baseline_ranks`."""
    backward_share: float = 2 / 3
    """Backward's share of a pass: two matrix products for each one of forward."""
    jitter: float = 0.0
    """Standard deviation of a rank's step time over its mean."""
    passes: int = 1
    """Forward and backward passes in a step (gradient accumulation); gradients are all-reduced in the last one."""
    optimizer_seconds: float = 0.0
    """Part of the step in which one rank updates all weights, after the last all-reduce."""
    baseline_ranks: int = 1
    """Number of ranks whose step time is given, and to which efficiency refers."""

    def assuming(self, parameters: Parameters) -> Workload:
        """Return the workload with their jitter and, if only its number of parameters is known, their tail."""
        return replace(self, jitter=parameters.jitter, network=self.network.with_tail(parameters.tail))


@dataclass(frozen=True)
class Machine:
    """The machine of the ranks, and how they all-reduce gradients."""

    cluster: Cluster
    algorithm: str = "ring"
    """Key in ALGORITHMS, or `best`: the fastest one of DIRECT for each message."""
    fusion: Fusion = Fusion()
    wire_bytes: int = BYTES_PER_PARAMETER
    """Bytes sent for a parameter's gradient: 4, or 2 if compressed."""
    request: float = 0.0
    """Seconds that the coordinator takes for one rank's request for one gradient."""
    crowding: float = 1.0
    """Step time of a rank while all ranks of its node compute, over its time on an idle node, without communication."""
    node_input: float = math.inf
    """Samples per second that a node can read and prepare."""
    storage_input: float = math.inf
    """Samples per second that the storage delivers to all nodes together."""
    overlap: bool = True
    """Whether communication runs while ranks compute."""
    gather_bytes: int = 0
    """Bytes that a sharded rank gathers for each weight (FSDP); 0 if every rank has all weights."""

    def all_reduce(self, num_bytes: float, num_ranks: int) -> float:
        """Return the seconds of an all-reduce over `num_ranks`."""
        if self.algorithm != BEST:
            return ALGORITHMS[self.algorithm](num_bytes, num_ranks, self.cluster)
        return min(seconds(num_bytes, num_ranks, self.cluster) for seconds in DIRECT.values())


@dataclass(frozen=True)
class Forecast:
    """Forecast of a step on `num_ranks`, in seconds."""

    num_ranks: int
    total: float
    efficiency: float
    """Step time of the baseline over `total`."""
    images_per_second: float
    """Speed of all ranks together."""
    step: SimulatedStep
    """The step without limits of input."""
    closed_form: float
    """Computing, then all communication in one message: `total` without overlap, fusion and negotiation."""


def forecast(workload: Workload, machine: Machine, num_ranks: int) -> Forecast:
    """Forecast a step on `num_ranks`."""
    alone = one_rank_seconds(workload, machine)
    step, closed_form = _step(workload, machine, alone, num_ranks)
    local = machine.cluster.ranks_on_node(num_ranks)
    wait_for_input = workload.batch_size * max(local / machine.node_input, num_ranks / machine.storage_input)
    total = max(step.total, wait_for_input)
    efficiency, images_per_second = workload.step_seconds / total, num_ranks * workload.batch_size / total
    return Forecast(num_ranks, total, efficiency, images_per_second, step, max(closed_form, wait_for_input))


@functools.lru_cache(maxsize=256)
def one_rank_seconds(workload: Workload, machine: Machine) -> float:
    """Return the step time of one rank with which the baseline's step takes what was measured (secant method)."""
    step = workload.step_seconds
    if workload.baseline_ranks == 1:
        return step
    before, off_before = 0.0, -step
    alone = step
    for _ in range(_MAX_ITERATIONS):
        off = _step(workload, machine, alone, workload.baseline_ranks)[0].total - step
        if abs(off) <= _BASELINE_ERROR * step or off == off_before:
            break
        # A step is at least the communication, however fast a rank computes.
        following = max(alone / 10, alone - off * (alone - before) / (off - off_before))
        before, off_before, alone = alone, off, following
    return alone


def _step(workload: Workload, machine: Machine, alone: float, num_ranks: int) -> tuple[SimulatedStep, float]:
    """Return a step of ranks that compute for `alone` seconds by themselves, and its time in closed form."""
    if num_ranks == 1:
        return SimulatedStep(alone, alone, 0.0), alone
    cluster = machine.cluster
    local = cluster.ranks_on_node(num_ranks)
    crowd = 1 + (machine.crowding - 1) * (local - 1) / max(1, cluster.ranks_per_node - 1)
    optimizer = min(workload.optimizer_seconds, alone)
    compute = (alone - optimizer) * simulation.slowdown(num_ranks, workload.jitter) * crowd
    if machine.gather_bytes:
        optimizer /= num_ranks
        step = _sharded_step(workload, machine, compute, num_ranks)
        communication = _sharded_seconds(workload.network.num_parameters, machine, num_ranks) * workload.passes
    else:
        step = _replicated_step(workload, machine, compute, num_ranks)
        communication = machine.all_reduce(workload.network.num_parameters * machine.wire_bytes, num_ranks)
    whole = SimulatedStep(step.total + optimizer, step.compute + optimizer, step.communication)
    return whole, compute + communication + optimizer


def _replicated_step(workload: Workload, machine: Machine, compute: float, num_ranks: int) -> SimulatedStep:
    """Simulate a step of ranks with all weights, which all-reduce gradients in the last pass."""
    backward = compute * workload.backward_share / workload.passes
    found = gradients(workload.network, backward, machine.wire_bytes)
    if not machine.overlap:
        found = [replace(gradient, ready=backward) for gradient in found]
    # Cores that reduce in host memory do not slow the GPU.
    contention = 0.0 if machine.algorithm == "host-memory" else machine.cluster.slowest(num_ranks).contention
    return simulation.simulate(
        compute - backward,
        found,
        functools.cache(partial(machine.all_reduce, num_ranks=num_ranks)),  # phases of a cycle repeat messages
        fusion=machine.fusion,
        contention=contention,
        request=machine.request * num_ranks,
    )


def _sharded_step(workload: Workload, machine: Machine, compute: float, num_ranks: int) -> SimulatedStep:
    """Simulate a step of sharded ranks, whose passes all gather weights and scatter gradients."""
    step = simulation.simulate_sharded(
        units(workload.network, compute / workload.passes, workload.backward_share),
        lambda count: all_gather(count * machine.gather_bytes, num_ranks, machine.cluster),
        lambda count: all_gather(count * machine.wire_bytes, num_ranks, machine.cluster),
        contention=machine.cluster.slowest(num_ranks).contention,
        overlap=machine.overlap,
    )
    return SimulatedStep(*(workload.passes * value for value in (step.total, step.compute, step.communication)))


def _sharded_seconds(num_parameters: int, machine: Machine, num_ranks: int) -> float:
    """Return the seconds of two all-gathers and a reduce-scatter of everything."""
    sent = partial(all_gather, num_ranks=num_ranks, cluster=machine.cluster)
    return 2 * sent(num_parameters * machine.gather_bytes) + sent(num_parameters * machine.wire_bytes)


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


def units(network: Network, seconds: float, backward_share: float) -> list[Unit]:
    """Return a network as units of FSDP, in forward order, whose passes take `seconds` together."""
    whole = sum(layer.multiplications for layer in network.layers)
    found, count, work = [], 0, 0.0
    for number, layer in enumerate(network.layers, 1):
        count, work = count + layer.num_parameters, work + seconds * layer.multiplications / whole
        if count >= simulation.MIN_UNIT_PARAMETERS or number == len(network.layers):
            found.append(Unit(work * (1 - backward_share), work * backward_share, count))
            count, work = 0, 0.0
    return found
