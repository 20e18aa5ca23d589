"""Steps and samples by batch size, for docs/explanation/noise-scale.svg."""

import math

from drawing import axes, curve, page, text

FRAME = (90, 20, 480, 220)
LOW, HIGH, MAX = -4, 4, 17  # powers of two of the batch over the noise scale; largest cost that is shown


def steps(ratio: float) -> float:
    """Return the steps that training takes over the fewest possible; `ratio` is the batch over the noise scale."""
    return 1 + 1 / ratio


def samples(ratio: float) -> float:
    """Return the samples that training takes over the fewest possible."""
    return 1 + ratio


def figure() -> str:
    """Return the figure, in logarithms of both axes."""
    left, top, width, height = FRAME

    def place(ratio: float, cost: float) -> tuple[float, float]:
        across = (math.log2(ratio) - LOW) / (HIGH - LOW)
        return left + width * across, top + height * (1 - math.log2(cost) / math.log2(MAX))

    parts = axes(*FRAME, "batch size / noise scale", "times the minimum")
    ratios = [2 ** (LOW + (HIGH - LOW) * number / 80) for number in range(81)]
    for power in range(LOW, HIGH + 1, 2):
        name = f"1/{2**-power}" if power < 0 else str(2**power)
        parts.append(text(name, place(2**power, 1)[0], top + height + 20, size=12))
    for cost in (1, 2, 4, 8, 16):
        parts.append(text(str(cost), left - 8, place(1, cost)[1] + 4, anchor="end", size=12))
    for name, cost, colour, dash, at in (
        ("steps", steps, "var(--c0)", "", 2**-2.6),
        ("samples", samples, "var(--c1)", "6 4", 2**2.6),
    ):
        parts.append(curve([place(ratio, cost(ratio)) for ratio in ratios], colour, dash=dash))
        x, y = place(at, cost(at))
        parts.append(text(name, x + (40 if name == "steps" else -48), y, colour=colour))
    return page(parts, 600, 290)
