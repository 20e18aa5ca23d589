"""Memory of a rank by what is sharded, for docs/explanation/sharding.svg."""

from drawing import box, page, text

NUM_RANKS = 8
PARTS = (("weights", 4, "var(--c0)"), ("gradients", 4, "var(--c1)"), ("Adam's two slots", 8, "var(--c2)"))
"""Bytes of a parameter in float32."""
ROWS = (("data parallel", ()), ("ZeRO-1", (2,)), ("ZeRO-2", (1, 2)), ("ZeRO-3, FSDP", (0, 1, 2)))
"""Names, and which of the parts are divided among the ranks."""
LEFT, TOP, ROW, SCALE = 130, 40, 40, 26


def bytes_of(sharded: tuple[int, ...]) -> list[float]:
    """Return the bytes a parameter of each part on one rank."""
    return [size / NUM_RANKS if number in sharded else size for number, (_, size, _) in enumerate(PARTS)]


def figure() -> str:
    """Return the figure: a bar for each way."""
    parts, x = [], float(LEFT)
    for name, _, colour in PARTS:
        parts.append(text(name, x, 22, anchor="start", colour=colour))
        x += 110
    for row, (name, sharded) in enumerate(ROWS):
        y, x = TOP + row * ROW, float(LEFT)
        parts.append(text(name, LEFT - 10, y + 19, anchor="end"))
        for size, (_, _, colour) in zip(bytes_of(sharded), PARTS, strict=True):
            parts.append(box(x, y, size * SCALE - 2, 28, colour, fill=0.3))
            x += size * SCALE
        parts.append(text(f"{sum(bytes_of(sharded)):g} bytes", x + 8, y + 19, anchor="start"))
    return page(parts, LEFT + 16 * SCALE + 100, TOP + len(ROWS) * ROW)
