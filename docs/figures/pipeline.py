"""A step of a pipeline of four stages, for docs/explanation/pipeline.svg."""

from drawing import box, page, text

NUM_STAGES, NUM_BATCHES = 4, 6
CELL, LEFT, TOP, ROW = 30, 80, 40, 32


def schedule() -> list[list[tuple[int, int, bool]]]:
    """Return, for each stage, the time, number and direction of each micro-batch: GPipe's, of unit times."""
    forward = NUM_BATCHES + NUM_STAGES - 1
    rows = []
    for stage in range(NUM_STAGES):
        row = [(stage + batch, batch, False) for batch in range(NUM_BATCHES)]
        row += [(forward + NUM_STAGES - 1 - stage + batch, batch, True) for batch in range(NUM_BATCHES)]
        rows.append(row)
    return rows


def figure() -> str:
    """Return the figure: a row for each stage; empty places are the bubble."""
    parts = [text("forward", LEFT, 22, anchor="start", colour="var(--c0)")]
    parts.append(text("backward", LEFT + 90, 22, anchor="start", colour="var(--c1)"))
    parts.append(text("empty: the bubble", LEFT + 190, 22, anchor="start"))
    for stage, row in enumerate(schedule()):
        y = TOP + stage * ROW
        parts.append(text(f"stage {stage}", 8, y + 18, anchor="start"))
        for time, batch, is_backward in row:
            colour = "var(--c1)" if is_backward else "var(--c0)"
            parts.append(box(LEFT + time * CELL, y, CELL - 3, 25, colour, fill=0.25))
            parts.append(text(str(batch + 1), LEFT + time * CELL + (CELL - 3) / 2, y + 18, size=12))
    return page(parts, LEFT + 2 * (NUM_BATCHES + NUM_STAGES - 1) * CELL + 10, TOP + NUM_STAGES * ROW + 5)
