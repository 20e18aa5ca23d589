"""One step on two ranks, for docs/tutorial/all-reduce.svg."""

from drawing import arrow, box, page, text

COLUMNS = (("its 32 samples", 90), ("its gradient", 260), ("the average", 460), ("equal weights", 630))
BOX_WIDTH, BOX_HEIGHT = 130, 40


def figure() -> str:
    """Return the figure: a row for each rank, and arrows between the rows where they all-reduce."""
    rows = {60: "var(--c0)", 140: "var(--c1)"}
    parts = []
    for y, colour in rows.items():
        for words, x in COLUMNS:
            parts += [box(x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2, BOX_WIDTH, BOX_HEIGHT, colour, radius=6)]
            parts += [text(words, x, y + 5)]
    xs = [x for _, x in COLUMNS]
    parts += [between((xs[0], y), (xs[1], y)) for y in rows]
    parts += [between((xs[1], start), (xs[2], end)) for start in rows for end in rows]
    parts += [between((xs[2], y), (xs[3], y)) for y in rows]
    parts += [text("rank 0", xs[0], 32), text("rank 1", xs[0], 178), text("all-reduce", (xs[1] + xs[2]) / 2, 24)]
    return page(parts, 720, 200)


def between(start: tuple[int, int], end: tuple[int, int]) -> str:
    """Return an arrow from the right side of one box to the left side of another."""
    half = BOX_WIDTH // 2
    return arrow((start[0] + half + 2, start[1]), (end[0] - half - 6, end[1]))
