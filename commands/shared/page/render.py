"""Render a page of sections from a template, as HTML or Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from allstep.commands.shared.page.document import Section

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
    )
    environment.filters |= {"plain": plain, "code": lambda text: str(text).replace("`", "'")}
    written = f"Written {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC by allstep. {note}".strip()
    return environment.get_template(template).render(title=title, written=written, sections=sections, problems=problems)


def plain(text: object) -> str:
    """Escape text for Markdown, including its tables."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", " ".join(str(text).split()))
