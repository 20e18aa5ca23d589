"""Draw docs/tutorial/all-reduce.svg, one step on two ranks: `python docs/figures/all_reduce.py`."""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "tutorial" / "all-reduce.svg"
STYLE = (
    "svg{--ink:#1c1f23;--faint:#8a929c;--c0:#0072b2;--c1:#d55e00}"
    "@media (prefers-color-scheme:dark){svg{--ink:#e8eaed;--faint:#7c858f;--c0:#56b4e9;--c1:#f0863c}}"
    "text{font:14px sans-serif;fill:var(--ink);text-anchor:middle}"
    "rect{fill:none;stroke-width:1.5}path{fill:none;stroke:var(--faint);stroke-width:1.5;marker-end:url(#tip)}"
)
COLUMNS = (("its 32 samples", 90), ("its gradient", 260), ("the average", 460), ("equal weights", 630))
WIDTH, HEIGHT, BOX_WIDTH, BOX_HEIGHT = 720, 200, 130, 40


def box(text: str, x: int, y: int, colour: str) -> str:
    """Return a box around a text, with its centre at x and y."""
    left, top = x - BOX_WIDTH // 2, y - BOX_HEIGHT // 2
    return (
        f'<rect x="{left}" y="{top}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" style="stroke:{colour}"/>'
        f'<text x="{x}" y="{y + 5}">{text}</text>'
    )


def arrow(start: tuple[int, int], end: tuple[int, int]) -> str:
    """Return an arrow from the right side of one box to the left side of another."""
    half = BOX_WIDTH // 2
    return f'<path d="M{start[0] + half + 2},{start[1]} L{end[0] - half - 6},{end[1]}"/>'


def figure() -> str:
    """Return the figure: a row for each rank, and arrows between the rows where they all-reduce."""
    rows = {60: "var(--c0)", 140: "var(--c1)"}
    parts = [box(text, x, y, colour) for y, colour in rows.items() for text, x in COLUMNS]
    xs = [x for _, x in COLUMNS]
    parts += [arrow((xs[0], y), (xs[1], y)) for y in rows]
    parts += [arrow((xs[1], start), (xs[2], end)) for start in rows for end in rows]
    parts += [arrow((xs[2], y), (xs[3], y)) for y in rows]
    parts += [
        f'<text x="{xs[0]}" y="{y + offset}">rank {rank}</text>' for rank, y, offset in ((0, 60, -28), (1, 140, 38))
    ]
    parts.append(f'<text x="{(xs[1] + xs[2]) // 2}" y="24">all-reduce</text>')
    tip = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" style="fill:var(--faint);stroke:none"/></marker></defs>'
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}">'
    return "\n".join([head, f"<style>{STYLE}</style>", tip, *parts, "</svg>", ""])


if __name__ == "__main__":
    FILE.write_text(figure())
