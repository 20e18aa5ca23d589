"""The parts of a report: sections of text, figures and tables, all as plain text, rendered as HTML or Markdown."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from allstep.commands.shared.measure import Estimate
from allstep.commands.shared.page.figures import Drawing
from allstep.common.base.errors import printable, visible

NOTHING = "–"
_LOG_WIDTH = 160
_NUMBER = re.compile(r"[\d–+-][\d.,%± e+-]*$")


@dataclass(frozen=True)
class Table:
    """A table; every cell is text, and every row is as long as the header."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def numeric(self) -> list[bool]:
        """Whether each column has only numbers; false for tables of up to two columns."""
        columns = zip(*self.rows, strict=True)
        return [len(self.header) > 2 and all(map(_NUMBER.match, map(str, column))) for column in columns]


@dataclass
class Section:
    """A part of the report with its own heading."""

    title: str
    text: list[str] = field(default_factory=list)
    figures: list[Drawing] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    items: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    """Shell commands that reproduce the numbers."""
    answers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Sentences that a reader should see first, by what they are about."""


def amount(value: float | None) -> str:
    """Format a number to four digits, with separators for thousands; a dash for None."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def share(value: float | None) -> str:
    """Format a share as a percentage."""
    return NOTHING if value is None else f"{value:.1%}"


def mebibytes(value: float | None) -> str:
    """Format bytes as MiB."""
    return NOTHING if value is None else f"{value / 2**20:,.0f}"


def median(estimate: Estimate | None) -> float | None:
    """Return the median of an estimate; None for None."""
    return estimate.median if estimate else None


def facts(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return an environment as pairs of name and text, with nested names joined by a space."""
    found: list[tuple[str, str]] = []
    for name, value in environment.items():
        if isinstance(value, Mapping):
            found += [(f"{name} {inner}", text) for inner, text in facts(value)]
        elif value not in (None, [], ""):
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            found.append((name.replace("_", " ") if name.islower() else name, text))
    return found


_TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, title: str, sections: Sequence[Section], problems: Sequence[str], *, note: str = "") -> str:
    """Render the report with one of the templates; `note` follows the time of writing."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=template.endswith(".html"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: visible(value) if type(value) is str else value,  # figures are Markup
    )
    environment.filters |= {"plain": plain, "code": _code}
    written = f"Written {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC by allstep. {note}".strip()
    return environment.get_template(template).render(title=title, written=written, sections=sections, problems=problems)


def print_table(table: Table) -> None:
    """Print a table without the columns that have no known cell; in a log, it may be wider than a terminal.

    Titles of columns may have several lines.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as Drawn

    console = Console(width=None if sys.stdout.isatty() else _LOG_WIDTH, markup=False, highlight=False, emoji=False)
    drawn = Drawn(title=printable(table.caption), title_justify="left", box=SIMPLE_HEAD)
    titles = ["\n".join(map(printable, title.split("\n"))) for title in table.header]
    rows = [list(map(printable, row)) for row in table.rows]
    columns = zip(titles, zip(*rows, strict=True), table.numeric, strict=False)
    known = [column for column in columns if {*column[1]} != {NOTHING}]
    for title, cells, is_number in known:
        drawn.add_column(title, justify="right" if is_number else "left", min_width=max(map(len, cells)))
    for row in zip(*(cells for _, cells, _ in known), strict=True):
        drawn.add_row(*row)
    console.print(drawn)


def plain(text: object) -> str:
    """Return text that stands for itself in Markdown, in a table as elsewhere."""
    return re.sub(r"([\\`*_{}\[\]<>|#~&])", r"\\\1", printable(" ".join(str(text).split())))


def _code(text: object) -> str:
    """Return a line of a code block, which it cannot end."""
    return printable(str(text)).replace("`", "'")
