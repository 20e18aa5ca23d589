"""Parts of the figures: colours that follow light and dark pages, texts, boxes, and axes of curves."""

from collections.abc import Iterable, Sequence
from html import escape

STYLE = (
    "svg{--ink:#1c1f23;--faint:#8a929c;--c0:#0072b2;--c1:#d55e00;--c2:#009e73}"
    "@media (prefers-color-scheme:dark){"
    "svg{--ink:#e8eaed;--faint:#7c858f;--c0:#56b4e9;--c1:#f0863c;--c2:#2fc79b}}"
    "text{font:14px sans-serif;fill:var(--ink);text-anchor:middle}"
    "rect{fill:none;stroke-width:1.5}path{fill:none;stroke:var(--faint);stroke-width:1.5}"
)
TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0,0 L8,4 L0,8 z" style="fill:var(--faint);stroke:none"/></marker></defs>'
)
"""The tip of an arrow."""


def page(parts: Iterable[str], width: int, height: int) -> str:
    """Return a whole figure."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">'
    return "\n".join([head, f"<style>{STYLE}</style>", TIP, *parts, "</svg>", ""])


def text(words: str, x: float, y: float, *, anchor: str = "middle", size: int = 14, colour: str = "var(--ink)") -> str:
    """Return a text whose line is at y."""
    style = f"text-anchor:{anchor};font-size:{size}px;fill:{colour}"
    return f'<text x="{x:g}" y="{y:g}" style="{style}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, colour: str, *, fill: float = 0.0, radius: int = 3) -> str:
    """Return a box with its upper left corner at x and y; `fill` is the opacity of its inside."""
    size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}"'
    inside = f"fill:{colour};fill-opacity:{fill:g}" if fill else "fill:none"
    return f'<rect {size} style="stroke:{colour};{inside}"/>'


def arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    """Return an arrow."""
    return f'<path d="M{start[0]:g},{start[1]:g} L{end[0]:g},{end[1]:g}" marker-end="url(#tip)"/>'


def curve(points: Sequence[tuple[float, float]], colour: str, *, dash: str = "") -> str:
    """Return a line through points."""
    path = " L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<path d="M{path}" style="stroke:{colour};stroke-width:2;stroke-dasharray:{dash or "none"}"/>'


def axes(left: float, top: float, width: float, height: float, x_label: str, y_label: str) -> list[str]:
    """Return the two axes of a frame with their names."""
    bottom, middle = top + height, top + height / 2
    return [
        f'<path d="M{left:g},{top:g} V{bottom:g} H{left + width:g}"/>',
        text(x_label, left + width / 2, bottom + 42),
        f'<g transform="rotate(-90 {left - 48:g} {middle:g})">{text(y_label, left - 48, middle)}</g>',
    ]
