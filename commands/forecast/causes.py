"""The largest cost of a step, and the change that helps most. Assumed values are never named as a cause."""

import functools
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from allstep.commands.forecast.allreduce import DIRECT, Link
from allstep.commands.forecast.forecast import BEST, Forecast, Machine, Workload, forecast

NOTICED = 0.01
"""Share of the step time from which a bottleneck is reported."""
UNKNOWN = "not measured"
"""Name of a cost that comes from assumed values."""

Case = tuple[Workload, Machine]

_PERFECT: dict[str, Callable[[Workload, Machine], Case]] = {
    "bandwidth": lambda workload, machine: (workload, _with_links(machine, bandwidth=math.inf)),
    "latency": lambda workload, machine: (workload, _with_links(machine, latency=0.0)),
    "negotiation": lambda workload, machine: (
        workload,
        replace(machine, request=0.0, fusion=replace(machine.fusion, cycle=0.0)),
    ),
    "stragglers": lambda workload, machine: (replace(workload, jitter=0.0), machine),
    "crowded nodes": lambda workload, machine: (workload, replace(machine, crowding=1.0)),
    "contention": lambda workload, machine: (workload, _with_links(machine, contention=0.0)),
}
"""Functions that return workload and machine without one cause of lost time."""
CAUSES = tuple(_PERFECT)
"""Names of causes, each known if its values were given or measured; input is only limited if it is given."""


def bottleneck(
    workload: Workload, machine: Machine, found: Forecast, known: Collection[str] = CAUSES
) -> tuple[str, float]:
    """Return what costs most at this size, and the share of the step time that would be saved if it were perfect.

    `found` is the forecast of the workload on the machine; causes that are not `known`, and may not be named, are
    perfect together, under the name UNKNOWN.
    """
    cases = {"input": (workload, replace(machine, node_input=math.inf, storage_input=math.inf))}
    cases |= {name: perfect(workload, machine) for name, perfect in _PERFECT.items() if name in known}
    assumed = [name for name in CAUSES if name not in known]
    if assumed:
        cases[UNKNOWN] = functools.reduce(lambda case, name: _PERFECT[name](*case), assumed, (workload, machine))
    gains = {name: 1 - forecast(*case, found.num_ranks).total / found.total for name, case in cases.items()}
    name = max(gains, key=gains.__getitem__)
    return (name, gains[name]) if gains[name] > NOTICED else ("computing", 0.0)


def what_helps(
    workload: Workload, machine: Machine, found: Forecast, known: Collection[str] = CAUSES
) -> tuple[str, float] | None:
    """Return the change that gains most, and the efficiency with it; None if the gain is less than NOTICED.

    `found` is the forecast of the workload on the machine; the values of `known` causes may be changed.
    """
    cases = _changes(workload, machine, known)
    changes = {name: forecast(*case, found.num_ranks).efficiency for name, case in cases}
    name = max(changes, key=changes.__getitem__)
    return (name, changes[name]) if changes[name] - found.efficiency > NOTICED else None


def _changes(workload: Workload, machine: Machine, known: Collection[str]) -> Iterator[tuple[str, Case]]:
    """Yield the changes that a user could make, but none of an assumed value."""
    twice = replace(workload, batch_size=2 * workload.batch_size, step_seconds=2 * workload.step_seconds)
    yield "twice the batch a rank", (twice, machine)
    if "stragglers" in known:
        yield "half the jitter", (replace(workload, jitter=workload.jitter / 2), machine)
    if "bandwidth" in known:
        yield "twice the bandwidth", (workload, _with_links(machine, bandwidth=2.0))
    if "latency" in known:
        yield "half the latency", (workload, _with_links(machine, latency=0.5))
    if machine.wire_bytes > 2:
        yield "16-bit gradients", (workload, replace(machine, wire_bytes=2))
    if not machine.overlap:
        yield "overlap", (workload, replace(machine, overlap=True))
    if not machine.gather_bytes:
        for name in DIRECT:
            if machine.algorithm not in (name, BEST):
                yield f"{name} all-reduce", (workload, replace(machine, algorithm=name))
    faster = replace(machine, node_input=2 * machine.node_input, storage_input=2 * machine.storage_input)
    yield "twice the input rate", (workload, faster)
    yield "half the requests (a cache of responses)", (workload, replace(machine, request=machine.request / 2))


def _with_links(machine: Machine, *, latency: float = 1.0, bandwidth: float = 1.0, contention: float = 1.0) -> Machine:
    """Return the machine with the links' values, and the bandwidth of host memory, multiplied by these factors."""

    def scaled(link: Link) -> Link:
        return Link(link.latency * latency, link.bandwidth * bandwidth, link.contention * contention)

    old = machine.cluster
    memory = old.host_memory * bandwidth
    return replace(machine, cluster=replace(old, intra=scaled(old.intra), inter=scaled(old.inter), host_memory=memory))
