"""Figures as SVG for the page: Matplotlib draws them, and the page's style sheet colours them.

Colours are replaced by variables of the style sheet, so that a figure follows light, dark and print. Figures saved as
separate files have the colours for light paper.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from allstep.common.base.errors import printable
from allstep.common.files.disk import write_atomically

# Okabe and Ito 2008, distinguished by people with any colour vision; report.html has a lighter set for dark pages.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_INK, _FAINT = "#1c1f24", "#8a929d"  # colours of nothing else in a figure
_MARKERS = "osD^vP"
_DASHES = ("-", "--", "-.", ":")
_REFERENCE_DASHES = (":", "--")
_LONGEST_LABEL_OF_TWO, _LONGEST_LABEL = 20, 60  # characters
_WIDTH, _HEIGHT = 3.6, 2.7  # inches; small, so that text stays legible on a phone


@dataclass(frozen=True)
class Line:
    """A curve."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    """Lower ends of the whiskers at the points, if any; `high` has the upper ends."""
    high: Sequence[float] = ()
    is_band: bool = False
    """Whether `low` and `high` are the edges of a band instead."""
    reference: bool = False
    """Whether it is drawn faint and without markers, as an ideal or a limit."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", _shown(self.label))


@dataclass(frozen=True)
class Drawing:
    """A drawing with its caption."""

    caption: str
    canvas: Any
    """Matplotlib's figure."""
    file: str | None = None
    """Name of its file next to the page, if it was saved."""

    @property
    def svg(self) -> str:
        """The figure as an element of a page."""
        return _element(_svg(self.canvas, transparent=True))

    def save(self, path: Path) -> Drawing:
        """Write PATH.svg and PATH.png; return the drawing with the name of its file.

        Raises OSError if the files cannot be written.
        """
        with write_atomically(path.with_suffix(".svg")) as stream:
            stream.write(_svg(self.canvas, facecolor="white").encode())
        with write_atomically(path.with_suffix(".png")) as stream, _without_glyph_warnings():
            self.canvas.savefig(stream, format="png", dpi=200, facecolor="white")
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
    """Draw curves in one frame.

    Args:
        x_scale, y_scale: linear, log2 or log10.
        x_ticks: positions of ticks; chosen by Matplotlib if empty.
        percent: whether y is a share, shown from 0 on.
        from_zero: whether y begins at 0.
    """
    # Short labels fit next to each other, also in the page's font, which Matplotlib does not know.
    columns = 2 if max((len(curve.label) for curve in curves), default=0) <= _LONGEST_LABEL_OF_TWO else 1
    figure, axes = _frame(-(-len(curves) // columns))
    number = num_references = 0
    for curve in curves:
        if curve.reference:
            style = _REFERENCE_DASHES[num_references % len(_REFERENCE_DASHES)]
            axes.plot(curve.x, curve.y, color=_FAINT, linestyle=style, linewidth=1.3, label=curve.label)
            num_references += 1
            continue
        color, marker = PALETTE[number % len(PALETTE)], _MARKERS[number % len(_MARKERS)]
        style = _DASHES[number % len(_DASHES)]  # dashes let overlapping curves show through
        few = len(curve.x) <= 20
        look = {"color": color, "marker": marker if few else None, "markersize": 4.5, "linestyle": style}
        axes.plot(curve.x, curve.y, linewidth=1.6, label=curve.label, **look)
        if curve.is_band:
            axes.fill_between(curve.x, curve.low, curve.high, color=color, linewidth=0, alpha=0.2)
        elif curve.low:
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
    look = {"ncols": columns, "frameon": False, "fontsize": 9}
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", **look)
    return Drawing(caption, figure)


def bars(
    caption: str, labels: Sequence[str], values: Sequence[float], *, x_label: str, whiskers: Sequence[float] = ()
) -> Drawing:
    """Draw horizontal bars, the first on top, each with its value; `whiskers` extend this far to either side."""
    figure, axes = _frame(0, height=0.9 + 0.3 * len(labels))
    positions = range(len(labels))
    look = {"color": PALETTE[0], "height": 0.62, "ecolor": _INK}
    axes.barh(positions, values, xerr=whiskers or None, **look)
    axes.set_yticks(positions, [*map(_shown, labels)])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    for position, value, whisker in zip(positions, values, whiskers or [0.0] * len(labels), strict=True):
        label = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
        axes.annotate(label, (value + whisker, position), (3, 0), textcoords="offset points", va="center", fontsize=9)
    axes.margins(x=0.15)
    axes.set_xlabel(x_label)
    return Drawing(caption, figure)


def confusion(caption: str, counts: Sequence[Sequence[int]], labels: Sequence[str]) -> Drawing:
    """Draw a confusion matrix: a row for each class of the samples, as dark as the share taken for each class."""
    from matplotlib.patches import Rectangle

    figure, axes = _frame(0, height=max(_HEIGHT, 0.9 + 0.22 * len(labels)))
    for row, values in enumerate(counts):
        for column, count in enumerate(values):
            if count:
                look = {"facecolor": PALETTE[0], "linewidth": 0, "alpha": max(0.08, 0.75 * count / sum(values))}
                axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, **look))
                axes.annotate(str(count), (column, row), ha="center", va="center", fontsize=min(9, 90 / len(labels)))
    positions, names = range(len(labels)), [*map(_shown, labels)]
    axes.set_xticks(positions, names, rotation=90)
    axes.set_yticks(positions, names)
    axes.set(xlim=(-0.5, len(labels) - 0.5), ylim=(len(labels) - 0.5, -0.5), xlabel="predicted", ylabel="class")
    axes.grid(visible=False)
    return Drawing(caption, figure)


def adopted(caption: str, plot: Callable[[], Any]) -> Drawing:
    """Restyle another library's plot; `plot` returns its axes and may set a style."""
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
            for location in ("left", "center"):
                one.set_title("", loc=location)
            for text in (one.xaxis.label, one.yaxis.label):
                text.set_color(_INK)
    figure.suptitle("")
    figure.set_layout_engine("constrained")
    pyplot.close(figure)
    return Drawing(caption, figure)


def _logarithmic(axis, *, binary: bool) -> None:
    """Make an axis logarithmic, with few ticks and plain numbers: 4Ki, 16Mi; 0.01, 10k."""
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


def _shown(label: str) -> str:
    """Return a label in printable characters, and only the end of a long one."""
    return printable(label)[-_LONGEST_LABEL:]


@contextmanager
def _without_glyph_warnings() -> Iterator[None]:
    """Draw characters for which Matplotlib has no font, in a browser that has one, without a warning for each."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        yield


def _svg(figure, **options: Any) -> str:
    written = io.StringIO()
    with _without_glyph_warnings():
        figure.savefig(written, format="svg", metadata={"Date": None}, **options)
    return written.getvalue()


def _element(svg: str) -> str:
    """Return the figure as an element for a page, without prolog, background and unused ids."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    used = set(re.findall(r"#([\w-]+)[\")]", svg))
    svg = re.sub(r' id="([\w.-]+)"', lambda found: found[0] if found[1] in used else "", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    # The page's font replaces Matplotlib's list of fonts.
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px inherit", svg).replace("px inherit", "px var(--font)")
    svg = svg.replace(_INK, "var(--ink)").replace(_FAINT, "var(--faint)")
    for number, color in enumerate(PALETTE):
        svg = svg.replace(color, f"var(--c{number})")
    return svg
