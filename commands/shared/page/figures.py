"""Figures as SVG for the page: Matplotlib draws them, and the page's style sheet colours them.

Colours are replaced by variables of the style sheet, so that a figure follows light, dark and print. As files of their
own they have the colours for light paper.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# Okabe and Ito 2008, distinguished by people with any colour vision; report.html has a lighter set for dark pages.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_INK, _FAINT = "#1c1f24", "#8a929d"  # of nothing else in a figure
_MARKERS = "osD^vP"
_DASHES = ("-", "--", "-.", ":")
_REFERENCE_DASHES = (":", "--")
_LONGEST_LABEL_OF_TWO = 28  # characters
_WIDTH, _HEIGHT = 4.4, 3.1  # inches; small, so that text stays legible on a phone


@dataclass(frozen=True)
class Line:
    """A curve."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    """Lower and upper end of a whisker at each point, where there are any."""
    high: Sequence[float] = ()
    reference: bool = False
    """Drawn faint and without markers: an ideal, a limit."""


@dataclass(frozen=True)
class Drawing:
    """A drawing with what stands under it."""

    caption: str
    canvas: Any
    """Matplotlib's figure."""
    file: str | None = None
    """Its name beside the page, where it was saved."""

    @property
    def svg(self) -> str:
        """The figure as an element of a page."""
        return _element(_svg(self.canvas, transparent=True))

    def save(self, path: Path) -> Drawing:
        """Write it as PATH.svg and PATH.png; returns the drawing that knows its file.

        Raises:
            OSError: they cannot be written.
        """
        path.with_suffix(".svg").write_text(_svg(self.canvas, facecolor="white"))
        self.canvas.savefig(path.with_suffix(".png"), dpi=200, facecolor="white")
        return replace(self, file=f"{path.name}.svg")


def lines(
    caption: str,
    curves: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    x_scale: str = "linear",
    y_scale: str = "linear",
    x_ticks: Sequence[float] = (),
    percent: bool = False,
    from_zero: bool = False,
) -> Drawing:
    """Curves in one frame.

    Args:
        x_scale, y_scale: linear, log2 or log10.
        x_ticks: where to put ticks; chosen by Matplotlib without.
        percent: whether y is a share, shown from 0 on.
        from_zero: whether y begins at 0.
    """
    columns = _legend_columns([curve.label for curve in curves])
    figure, axes = _frame(-(-len(curves) // columns))
    number = num_references = 0
    for curve in curves:
        if curve.reference:
            style = _REFERENCE_DASHES[num_references % len(_REFERENCE_DASHES)]
            axes.plot(curve.x, curve.y, color=_FAINT, linestyle=style, linewidth=1.3, label=curve.label)
            num_references += 1
            continue
        color, marker = PALETTE[number % len(PALETTE)], _MARKERS[number % len(_MARKERS)]
        style = _DASHES[number % len(_DASHES)]  # of curves that lie over each other, each shows through the next
        few = len(curve.x) <= 20
        look = {"color": color, "marker": marker if few else None, "markersize": 4.5, "linestyle": style}
        axes.plot(curve.x, curve.y, linewidth=1.6, label=curve.label, **look)
        if curve.low:
            axes.vlines(curve.x, curve.low, curve.high, color=color, linewidth=1.2, alpha=0.6)
        number += 1
    for axis, scale in ((axes.xaxis, x_scale), (axes.yaxis, y_scale)):
        if scale != "linear":
            _logarithmic(axis, binary=scale == "log2")
    if x_ticks:
        axes.set_xticks(list(x_ticks), [f"{tick:g}" for tick in x_ticks])
        axes.minorticks_off()
    if percent:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    if percent or from_zero:
        axes.set_ylim(bottom=0)
    if x_label == "epoch":
        axes.locator_params(axis="x", integer=True)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    look = {"ncols": columns, "frameon": False, "fontsize": 8}
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", **look)
    return Drawing(caption, figure)


def bars(
    caption: str, labels: Sequence[str], values: Sequence[float], *, x_label: str, whiskers: Sequence[float] = ()
) -> Drawing:
    """Horizontal bars, the first on top, each with its value; `whiskers` are half as long as they are drawn."""
    figure, axes = _frame(0, height=0.9 + 0.3 * len(labels))
    places = range(len(labels))
    look = {"color": PALETTE[0], "height": 0.62, "ecolor": _INK}
    axes.barh(places, values, xerr=whiskers or None, **look)
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    for placement, value, whisker in zip(places, values, whiskers or [0.0] * len(labels), strict=True):
        label = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
        axes.annotate(label, (value + whisker, placement), (3, 0), textcoords="offset points", va="center", fontsize=8)
    axes.margins(x=0.15)
    axes.set_xlabel(x_label)
    return Drawing(caption, figure)


def adopted(caption: str, plot: Callable[[], Any]) -> Drawing:
    """Somebody else's plot, which returns its axes and may set a style of its own, in our ink."""
    import matplotlib as mpl
    import numpy as np
    from matplotlib import pyplot

    with mpl.rc_context():
        mpl.rcParams["text.parse_math"] = False
        axes = np.ravel(plot())
        figure = axes[0].figure
        for one in figure.axes:
            one.tick_params(colors=_INK)
            one.set_facecolor("none")
            one.grid(color=_FAINT, linewidth=0.5, alpha=0.35)
            for placement in ("left", "center"):
                one.set_title("", loc=placement)
            for text in (one.xaxis.label, one.yaxis.label):
                text.set_color(_INK)
    figure.suptitle("")
    figure.set_layout_engine("constrained")
    pyplot.close(figure)
    return Drawing(caption, figure)


def _logarithmic(axis, *, binary: bool) -> None:
    """Few ticks, with plain numbers: 4Ki, 16Mi; 0.01, 10k."""
    from matplotlib.ticker import LogLocator, NullLocator

    step, units = (1024, ("", "Ki", "Mi", "Gi")) if binary else (1000, ("", "k", "M", "G"))

    def named(value: float, _) -> str:
        power = 0
        while value >= step and power < len(units) - 1:
            value, power = value / step, power + 1
        return f"{value:g}{units[power]}"

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(base=64 if binary else 10))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(named)


def _legend_columns(labels: Sequence[str]) -> int:
    """Two where both fit beside each other, in the page's font as well, which Matplotlib does not know."""
    return 2 if max(map(len, labels), default=0) <= _LONGEST_LABEL_OF_TWO else 1


def _frame(num_legend_rows: int, height: float = _HEIGHT):
    import matplotlib

    matplotlib.use("svg")
    from matplotlib.figure import Figure as Canvas

    matplotlib.rcParams.update(
        {
            "font.family": "sans-serif", "font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "allstep",
            "text.parse_math": False, "text.color": _INK, "axes.labelcolor": _INK, "axes.edgecolor": _FAINT,
            "xtick.color": _INK, "ytick.color": _INK, "axes.spines.top": False, "axes.spines.right": False,
            "axes.grid": True, "grid.color": _FAINT, "grid.linewidth": 0.5, "grid.alpha": 0.35,
        }
    )  # fmt: skip
    figure = Canvas(figsize=(_WIDTH, height + 0.17 * num_legend_rows), layout="constrained")
    return figure, figure.add_subplot()


def _svg(figure, **options: Any) -> str:
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None}, **options)
    return written.getvalue()


def _element(svg: str) -> str:
    """The figure as an element that a page can hold: without prolog, background and names that nothing refers to."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    used = set(re.findall(r"#([\w-]+)[\")]", svg))
    svg = re.sub(r' id="([\w.-]+)"', lambda found: found[0] if found[1] in used else "", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    # The page's own font; Matplotlib's list ends in one that is there.
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px inherit", svg).replace("px inherit", "px var(--font)")
    svg = svg.replace(_INK, "var(--ink)").replace(_FAINT, "var(--faint)")
    for number, color in enumerate(PALETTE):
        svg = svg.replace(color, f"var(--c{number})")
    return svg
