"""Settings of Sphinx, which builds the site: `make docs`."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS / "site"))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # autodoc imports TensorFlow

import generate  # noqa: E402

from allstep.common.base.version import VERSION  # noqa: E402

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "allstep"
project_copyright = "the allstep authors, Apache-2.0"
release = version = VERSION
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_design"]
exclude_patterns = ["requirements.txt", "site"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

html_theme = "furo"
html_title = f"allstep {VERSION}"
html_static_path = ["site/images.css"]
html_css_files = ["images.css"]
html_favicon = "site/icon.svg"
html_copy_source = False
html_theme_options = {"source_directory": "docs/"}

LINK_UP = re.compile(r"\[([^\]]*)\]\((\.\./[^)#]+)(#[^)]*)?\)")
"""Link from a page to a file of a folder above, which may be out of docs/."""


def link_inside(match: re.Match[str], page: str) -> str:
    """Return a link as the site has it: a page, or the name of a file that only the repository has."""
    text, path, anchor = match.groups()
    path = os.path.normpath(Path("docs", page).parent / path)
    if path.startswith("docs/"):
        return match[0]
    if path in generate.REPOSITORY_PAGES:
        return f"[{text}](/generated/{generate.REPOSITORY_PAGES[path]}{anchor or ''})"
    return f"{text} (`{path}`)" if path not in text else text


def read_source(_app: Sphinx, page: str, content: list[str]) -> None:
    """Replace links out of docs/ in a page's text."""
    if not page.startswith("generated/"):
        content[0] = LINK_UP.sub(lambda match: link_inside(match, page), content[0])


def setup(app: Sphinx) -> None:
    """Write the generated pages before Sphinx looks for pages."""
    app.connect("builder-inited", lambda _: generate.write(DOCS / "generated"))
    app.connect("source-read", read_source)
