"""One training step, event by event: gradients that get ready, fuse, and travel while backward goes on.

Times are those of the slowest rank, for which the others wait. Two ways to fuse are known: Horovod's, whose background
thread wakes every cycle and packs what is ready (Sergeev and Del Balso 2018, section 4), and DDP's, whose buckets are
laid out before (Li et al. 2020, section 3.2.3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MIB = 2**20
_DDP_FIRST_BUCKET = 1 * MIB


@dataclass(frozen=True)
class Gradient:
    """What one layer's backward pass yields."""

    ready: float
    """Seconds of backward work until it is there."""
    num_bytes: float
    num_tensors: int = 1


@dataclass(frozen=True)
class Fusion:
    """How gradients are put together before they travel."""

    threshold: float = 128 * MIB
    """Bytes that travel together at most; 0 sends each gradient alone, and a larger gradient always travels alone."""
    cycle: float = 0.001
    """Seconds between two looks at what is ready."""
    buckets: bool = False
    """Whether buckets are laid out in the order of backward, each sent when it is full, as DDP does."""


@dataclass(frozen=True)
class SimulatedStep:
    """How a step went; all in seconds."""

    total: float
    compute: float
    """Forward and backward of the slowest rank, as they would be without communication."""
    communication: float
    """During which an all-reduce was under way."""


def simulate(
    forward: float,
    gradients: Sequence[Gradient],
    all_reduce: Callable[[float], float],
    *,
    fusion: Fusion,
    contention: float = 0.0,
    request: float = 0.0,
) -> SimulatedStep:
    """Let a step pass.

    Args:
        forward: seconds until backward begins.
        gradients: in the order in which backward yields them; the last `ready` is backward's length.
        all_reduce: seconds that a message of so many bytes takes. One is under way at a time.
        contention: share of its speed that backward loses while an all-reduce is under way: 0 for a network that
            works alone, 1 for ranks on CPUs that reduce by themselves.
        request: seconds that the coordinator takes to learn of one gradient from all ranks, one after the other.
    """
    clock, work, busy = forward, 0.0, 0.0
    done = 0  # gradients that are ready
    sent = 0  # and those that have travelled
    num_collectives = 0
    known = forward  # when the coordinator has time again
    negotiated: list[float] = []
    backward = gradients[-1].ready
    look = forward  # when Horovod's thread looks next

    def advance(until: float, rate: float) -> None:
        """Let backward work until the clock shows `until`, and note what gets ready."""
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
        if fusion.buckets:
            advance(max(clock, negotiated[last - 1]), 1.0)
        else:
            advance(max(clock, negotiated[sent]), 1.0)
            advance(_next_look(look, clock, fusion.cycle), 1.0)
            look = clock + fusion.cycle
            last = _packed(gradients, negotiated, sent, clock, fusion.threshold)
        seconds = all_reduce(sum(gradient.num_bytes for gradient in gradients[sent:last]))
        advance(clock + seconds, 1.0 - contention)
        look = max(look, clock)
        busy, sent, num_collectives = busy + seconds, last, num_collectives + 1
    return SimulatedStep(clock, forward + backward, busy)


def _next_look(look: float, now: float, cycle: float) -> float:
    """The first moment from `now` on at which a thread looks that does so at `look` and every cycle after it."""
    if cycle == 0 or now <= look:
        return max(now, look)
    return look + math.ceil((now - look) / cycle - 1e-9) * cycle


def _packed(
    gradients: Sequence[Gradient], negotiated: Sequence[float], first: int, now: float, threshold: float
) -> int:
    """The end of the run of gradients from `first` on that travel together."""
    last, num_bytes = first + 1, gradients[first].num_bytes
    while last < len(negotiated) and negotiated[last] <= now and num_bytes + gradients[last].num_bytes <= threshold:
        num_bytes += gradients[last].num_bytes
        last += 1
    return last


def _bucket_ends(gradients: Sequence[Gradient], fusion: Fusion) -> list[int]:
    """Where DDP's buckets end: one closes with the gradient that fills it, the first one early."""
    ends, num_bytes, limit = [], 0.0, min(_DDP_FIRST_BUCKET, fusion.threshold)
    for number, gradient in enumerate(gradients, 1):
        num_bytes += gradient.num_bytes
        if num_bytes >= limit or number == len(gradients):
            ends.append(number)
            num_bytes, limit = 0.0, fusion.threshold
    return ends
