"""One training step of sharded ranks (FSDP, ZeRO 3), event by event: weights are gathered before a unit computes.

The units are gathered in forward and again in backward, each while the one before it computes (prefetching), and their
gradients are reduce-scattered while backward goes on (Zhao et al. 2023, sections 3.2 and 3.3). One collective runs at a
time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from allstep.commands.forecast.simulation import SimulatedStep

MIN_UNIT_PARAMETERS = 1_000_000
"""Layers are gathered together until they have as many parameters."""


@dataclass(frozen=True)
class Unit:
    """Layers whose weights are gathered together."""

    forward: float
    """Seconds of forward work."""
    backward: float
    num_parameters: int


def simulate_sharded(
    units: Sequence[Unit],
    gather: Callable[[int], float],
    scatter: Callable[[int], float],
    *,
    contention: float = 0.0,
    overlap: bool = True,
) -> SimulatedStep:
    """Simulate one pass, forward and backward.

    Args:
        units: in forward order.
        gather: returns the seconds until all ranks have the weights of so many parameters.
        scatter: returns the seconds of the reduce-scatter of their gradients.
        contention: share of its speed that computing loses while a collective runs.
        overlap: whether collectives run while ranks compute.
    """
    backward = list(reversed(units))
    gathers = [gather(unit.num_parameters) for unit in (*units, *backward)]
    gathers[len(units)] = 0.0  # the last unit of forward, which is still there
    scatters = [0.0] * len(units) + [scatter(unit.num_parameters) for unit in backward]
    works = [unit.forward for unit in units] + [unit.backward for unit in backward]
    compute, communication = math.fsum(works), math.fsum(gathers) + math.fsum(scatters)
    if not overlap:
        return SimulatedStep(compute + communication, compute, communication)
    clock = link_free = gathers[0]  # the first unit waits for its weights
    pending = 0.0  # seconds of reduce-scatters that wait for the link
    for number, work in enumerate(works):
        # While this unit computes, the link scatters what is ready and gathers the next unit.
        following = gathers[number + 1] if number + 1 < len(works) else 0.0
        link_free = max(link_free, clock) + pending + following
        busy = link_free - clock
        slowed = work / (1 - contention) if contention < 1 else math.inf
        clock += slowed if slowed <= busy else work + contention * busy
        if following:
            clock = max(clock, link_free)
        pending = scatters[number]
    return SimulatedStep(max(clock, link_free) + pending, compute, communication)
