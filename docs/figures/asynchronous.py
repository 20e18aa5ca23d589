"""Steps with and without waiting, for docs/explanation/asynchronous.svg."""

from drawing import box, page, text

COMPUTE = ((5, 5, 5, 5), (5, 9, 5, 5), (6, 5, 5, 6))
"""Seconds of each step of each rank; rank 1 is slow once."""
EXCHANGE = 1.0
SCALE, LEFT, ROW = 22, 70, 30


def synchronous() -> list[list[tuple[float, float]]]:
    """Return the start and end of each step's computing, on each rank; all exchange when the slowest is done."""
    rows: list[list[tuple[float, float]]] = [[] for _ in COMPUTE]
    now = 0.0
    for step in range(len(COMPUTE[0])):
        for rank, seconds in enumerate(COMPUTE):
            rows[rank].append((now, now + seconds[step]))
        now = max(row[-1][1] for row in rows) + EXCHANGE
    return rows


def asynchronous() -> list[list[tuple[float, float]]]:
    """Return the same where each rank exchanges with the server and goes on."""
    rows = []
    for seconds in COMPUTE:
        now, row = 0.0, []
        for one in seconds:
            row.append((now, now + one))
            now += one + EXCHANGE
        rows.append(row)
    return rows


def figure() -> str:
    """Return the figure: three ranks by either way, one below the other."""
    parts = []
    titles = ("synchronous: all wait for the slowest", "asynchronous: no waiting, but stale gradients")
    for block, (title, rows) in enumerate(zip(titles, (synchronous(), asynchronous()), strict=True)):
        top = 40 + block * 150
        parts.append(text(title, LEFT, top - 12, anchor="start"))
        for rank, row in enumerate(rows):
            y = top + rank * ROW
            parts.append(text(f"rank {rank}", 8, y + 17, anchor="start"))
            for step, (start, end) in enumerate(row):
                parts.append(box(LEFT + start * SCALE, y, (end - start) * SCALE, 24, "var(--c0)", fill=0.25))
                parts.append(text(str(step + 1), LEFT + (start + end) / 2 * SCALE, y + 17, size=12))
    return page(parts, LEFT + 32 * SCALE, 290)
