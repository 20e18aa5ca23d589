"""One training step, event by event: gradients become ready, are fused and all-reduced while backward goes on.

Times are those of the slowest rank, for which the others wait. There are two ways of fusing: Horovod's, whose
background thread wakes every cycle and packs the gradients that are ready (Sergeev and Del Balso 2018, section 4), and
DDP's, whose buckets are laid out in advance (Li et al. 2020, section 3.2.3).
"""

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MIB = 2**20
NUM_PHASES = 8
"""Number of moments at which backward may begin within a cycle of Horovod's thread, over which a step is averaged."""
_DDP_FIRST_BUCKET = 1 * MIB


@dataclass(frozen=True)
class Gradient:
    """The gradients of one layer."""

    ready: float
    """Seconds of backward work until they are ready."""
    num_bytes: float
    num_tensors: int = 1


@dataclass(frozen=True)
class Fusion:
    """Fusion of gradients into messages."""

    threshold: float = 128 * MIB
    """Maximum bytes of a message; 0 sends each gradient separately, and a larger gradient is its own message."""
    cycle: float = 0.001
    """Seconds between two checks for ready gradients."""
    buckets: bool = False
    """Whether buckets are laid out in the order of backward, each sent when it is full, as DDP does."""


@dataclass(frozen=True)
class SimulatedStep:
    """Times of a simulated step, in seconds."""

    total: float
    compute: float
    """Forward and backward of the slowest rank, without slowdown by communication."""
    communication: float
    """Time during which an all-reduce was running."""


def simulate(
    forward: float,
    gradients: Sequence[Gradient],
    all_reduce: Callable[[float], float],
    *,
    fusion: Fusion,
    contention: float = 0.0,
    request: float = 0.0,
) -> SimulatedStep:
    """Simulate a step, averaged over the phases of Horovod's cycle, which runs independently of the steps.

    Args:
        forward: seconds until backward begins.
        gradients: gradients in the order of the backward pass; the last `ready` is the duration of backward.
        all_reduce: returns the seconds of a message of so many bytes. One all-reduce runs at a time.
        contention: share of its speed that backward loses while an all-reduce runs: 0 if the network hardware does the
            work, 1 for ranks on CPUs that reduce themselves.
        request: seconds that the coordinator takes to receive all ranks' requests for one gradient.
    """
    is_cyclic = fusion.cycle > 0 and not fusion.buckets
    phases = [(number + 0.5) / NUM_PHASES for number in range(NUM_PHASES)] if is_cyclic else [0.0]
    steps = [
        _simulate(forward, gradients, all_reduce, fusion, contention, request, forward + phase * fusion.cycle)
        for phase in phases
    ]
    total, communication = (statistics.fmean(times) for times in zip(*steps, strict=True))
    return SimulatedStep(total, forward + gradients[-1].ready, communication)


def _simulate(
    forward: float,
    gradients: Sequence[Gradient],
    all_reduce: Callable[[float], float],
    fusion: Fusion,
    contention: float,
    request: float,
    look: float,
) -> tuple[float, float]:
    """Return the seconds of a step and those of its all-reduces; `look` is when Horovod's thread wakes first."""
    clock, work, busy = forward, 0.0, 0.0
    done = 0  # gradients that are ready
    sent = 0  # gradients that were sent
    num_collectives = 0
    known = forward  # when the coordinator is free again
    negotiated: list[float] = []

    def advance(until: float, rate: float) -> None:
        """Run backward until the clock shows `until`, and record the gradients that become ready."""
        nonlocal clock, work, done, known
        while done < len(gradients):
            needed = (gradients[done].ready - work) / rate if rate > 0 else math.inf
            if clock + needed > until:
                work = work + (until - clock) * rate
                clock = until
                return
            clock, work = clock + needed, gradients[done].ready
            known = max(known, clock) + request * gradients[done].num_tensors
            negotiated.append(known)
            done += 1
        clock = max(clock, until)

    ends = _bucket_ends(gradients, fusion) if fusion.buckets else []
    while sent < len(gradients):
        last = ends[num_collectives] if fusion.buckets else sent + 1
        while done < last:
            advance(clock + (gradients[done].ready - work), 1.0)
        advance(max(clock, negotiated[last - 1]), 1.0)
        if not fusion.buckets:
            advance(_next_look(look, clock, fusion.cycle), 1.0)
            look = clock + fusion.cycle
            last = _packed(gradients, negotiated, sent, clock, fusion.threshold)
        seconds = all_reduce(sum(gradient.num_bytes for gradient in gradients[sent:last]))
        advance(clock + seconds, 1.0 - contention)
        look = max(look, clock)
        busy, sent, num_collectives = busy + seconds, last, num_collectives + 1
    return clock, busy


def _next_look(look: float, now: float, cycle: float) -> float:
    """Return the first moment from `now` on at which a thread wakes that wakes at `look` and every cycle later."""
    if cycle == 0 or now <= look:
        return max(now, look)
    return look + math.ceil((now - look) / cycle - 1e-9) * cycle


def _packed(
    gradients: Sequence[Gradient], negotiated: Sequence[float], first: int, now: float, threshold: float
) -> int:
    """Return the end of the run of gradients from `first` on that are sent together."""
    last, num_bytes = first + 1, gradients[first].num_bytes
    while last < len(negotiated) and negotiated[last] <= now and num_bytes + gradients[last].num_bytes <= threshold:
        num_bytes += gradients[last].num_bytes
        last += 1
    return last


def _bucket_ends(gradients: Sequence[Gradient], fusion: Fusion) -> list[int]:
    """Return the ends of DDP's buckets: a bucket closes with the gradient that fills it; the first one is smaller."""
    ends, num_bytes, limit = [], 0.0, min(_DDP_FIRST_BUCKET, fusion.threshold)
    for number, gradient in enumerate(gradients, 1):
        num_bytes += gradient.num_bytes
        if num_bytes >= limit or number == len(gradients):
            ends.append(number)
            num_bytes, limit = 0.0, fusion.threshold
    return ends


# One training step of sharded ranks (FSDP, ZeRO 3), event by event: weights are gathered before a unit computes.
# The units are gathered in forward and again in backward, each while the one before it computes (prefetching), and
# their gradients are reduce-scattered while backward goes on (Zhao et al. 2023, sections 3.2 and 3.3). One collective
# runs at a time.
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


# Time of the slowest of many ranks, for which all ranks wait in every step.
_NUM_POINTS = 2000
_REACH = 9.0  # standard deviations; the largest of 100,000 is at 4.4


@functools.cache
def expected_largest(number: int) -> float:
    """Return the expected largest of `number` independent standard normal values: 0 for 1, 1.42 for 8, 3.04 for 512.

    It is the mean of the distribution function F(x)^n: the integral of 1 - F^n above 0 minus that of F^n below (David
    and Nagaraja 2003, Order Statistics, section 3.1).
    """
    if number == 1:
        return 0.0
    width = _REACH / _NUM_POINTS
    points = [(i + 0.5) * width for i in range(_NUM_POINTS)]
    below = statistics.NormalDist().cdf
    return width * math.fsum((1 - below(x) ** number) - below(-x) ** number for x in points)


def slowdown(num_ranks: int, jitter: float) -> float:
    """Return the expected time of the slowest of `num_ranks`, in units of the mean time.

    `jitter` is the standard deviation of a rank's step time over its mean.
    """
    return 1 + jitter * expected_largest(num_ranks)


def jitter_of(seconds: Sequence[float]) -> float:
    """Return standard deviation over mean of at least two measured step times of one rank."""
    return statistics.stdev(seconds) / statistics.fmean(seconds)
