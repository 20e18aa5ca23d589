"""The cost model's times, for docs/explanation/all-reduce-time.svg."""

import math

from drawing import axes, curve, page, text

LATENCY, BANDWIDTH = 20e-6, 1.25e9  # seconds and bytes a second: TCP over a link of 10 Gbit/s
NUM_RANKS = 64
SIZES = [2**power for power in range(10, 31)]
FRAME = (90, 20, 480, 240)


def ring(size: float, num_ranks: int = NUM_RANKS) -> float:
    """Return the seconds of a ring all-reduce of `size` bytes."""
    return 2 * (num_ranks - 1) * LATENCY + 2 * (num_ranks - 1) / num_ranks * size / BANDWIDTH


def doubling(size: float, num_ranks: int = NUM_RANKS) -> float:
    """Return the seconds of recursive doubling, in which each rank sends all bytes log2 N times."""
    return math.log2(num_ranks) * (LATENCY + size / BANDWIDTH)


def figure() -> str:
    """Return the figure, in logarithms of both axes."""
    left, top, width, height = FRAME
    low, high = -4, 1  # powers of ten of the seconds

    def place(size: float, seconds: float) -> tuple[float, float]:
        across = math.log2(size / SIZES[0]) / math.log2(SIZES[-1] / SIZES[0])
        return left + width * across, top + height * (high - math.log10(seconds)) / (high - low)

    parts = axes(*FRAME, "bytes", "seconds")
    for power, name in ((10, "1 KiB"), (20, "1 MiB"), (30, "1 GiB")):
        parts.append(text(name, place(2**power, 1)[0], top + height + 20, size=12))
    for power in range(low, high + 1):
        parts.append(text(f"{10.0**power:g}", left - 8, place(1024, 10.0**power)[1] + 4, anchor="end", size=12))
    lines = (("ring", ring, "var(--c0)", ""), ("recursive doubling", doubling, "var(--c1)", "6 4"))
    for number, (name, seconds, colour, dash) in enumerate(lines):
        parts.append(curve([place(size, seconds(size)) for size in SIZES], colour, dash=dash))
        parts.append(text(name, left + 30, top + 20 + 22 * number, anchor="start", colour=colour))
    return page(parts, 600, 310)
