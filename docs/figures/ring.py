"""A ring all-reduce of four ranks, for docs/explanation/ring.svg."""

from drawing import box, page, text

NUM_RANKS = 4
CELL, GAP, LEFT, TOP = 22, 30, 70, 60
COLOURS = ("var(--c0)", "var(--c1)", "var(--c2)", "var(--faint)")


def steps() -> list[list[list[set[int]]]]:
    """Return, after each step, the ranks whose values each part of each rank is the sum of."""
    state = [[{rank} for _ in range(NUM_RANKS)] for rank in range(NUM_RANKS)]
    found = [state]
    for step in range(2 * (NUM_RANKS - 1)):
        state = [list(parts) for parts in state]
        adds = step < NUM_RANKS - 1
        for rank in range(NUM_RANKS):  # each sends one part to the next rank of the ring
            part = (rank - step) % NUM_RANKS
            sent = found[-1][rank][part]
            received = (rank + 1) % NUM_RANKS
            state[received][part] = found[-1][received][part] | sent if adds else sent
        found.append(state)
    return found


def figure() -> str:
    """Return the figure: a column after each step, a row for each rank, and four parts in each."""
    names = ("reduce-scatter: each part is added once more", "all-gather: whole sums are passed on")
    width, height = NUM_RANKS * CELL + GAP, TOP + NUM_RANKS * (CELL + 12)
    parts = [text(name, LEFT + width, 20 + row * height, anchor="start") for row, name in enumerate(names)]
    for step, state in enumerate(steps()):
        row, column = (0, step) if step < NUM_RANKS else (1, step - NUM_RANKS + 1)
        x, top = LEFT + column * width, TOP + row * height
        title = "at first" if not step else f"step {step}"
        parts.append(text(title, x + NUM_RANKS * CELL / 2, top - 12, size=12))
        for rank, sums in enumerate(state):
            for part, added in enumerate(sums):
                share = len(added) / NUM_RANKS
                at = x + part * CELL, top + rank * (CELL + 12)
                parts.append(box(*at, CELL - 3, CELL, COLOURS[part], fill=0.15 + 0.6 * share**2))
                parts.append(text(str(len(added)), at[0] + (CELL - 3) / 2, at[1] + 16, size=12))
    for rank in range(NUM_RANKS):
        parts.append(text(f"rank {rank}", 8, TOP + rank * (CELL + 12) + 16, anchor="start"))
        parts.append(text(f"rank {rank}", LEFT + 38, TOP + height + rank * (CELL + 12) + 16, anchor="start"))
    return page(parts, LEFT + NUM_RANKS * width, 2 * height)
