"""Pages of the site that are written from the code. Oracles: tyro's --help, the source's text, and Sphinx itself."""

from __future__ import annotations

import ast
import functools
import html
import http.server
import importlib.util
import itertools
import re
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from browser import CUT_OFF, WIDTHS, chromium
from ranks import REPOSITORY
from requirements import need, skip

from allstep.commands.cli import COMMANDS
from allstep.common.config.train_config import TrainConfig

SITE = REPOSITORY / "docs" / "site"
ARTEFACTS = REPOSITORY / "build" / "artefacts" / "site"
"""Folder of the screenshots; git ignores build/."""
PAGES = ("index", "search", "tutorial/two-ranks", "explanation/all-reduce", "api", "generated/all-flags")
FOUND = """new Promise(resolve => {
  const look = () => {
    const links = [...document.querySelectorAll("#search-results li a")].map(link => link.href);
    links.length > 2 ? resolve(links.join(" ")) : setTimeout(look, 50);
  };
  look();
})"""
"""Expression for the pages that a search has found."""
READ = re.compile(r'environ(?:\.get\(|\[)"([A-Z_]+)"(?!\] = )|"([A-Z_]+)" in (?:os\.)?environ')


@pytest.fixture
def generate(monkeypatch):
    """Return the module that writes the pages."""
    monkeypatch.syspath_prepend(SITE)
    return importlib.import_module("generate")


def test_every_flag_has_a_row_with_its_meaning(generate):
    rows = re.findall(r"^\| `--([\w-]+)` \|.*\| (.+) \|$", generate.flags_page(), re.MULTILINE)
    names = [name for name, _ in rows]
    assert sorted(names) == sorted([*TrainConfig().flat(), "list-strategies"])
    assert [name for name, meaning in rows if len(meaning.split()) < 2] == []


def test_every_command_has_its_help(generate):
    page = generate.commands_page()
    assert re.findall(r"^## allstep (\S+)$", page, re.MULTILINE) == list(COMMANDS)
    sections = re.findall(r"^#{2,3} allstep.*\n\n```text\n(.*)\n", page, re.MULTILINE)
    assert [line for line in sections if not line.startswith("usage: ")] == []
    assert len(sections) == 1 + len(COMMANDS) + sum(map(len, generate.SUBCOMMANDS.values()))


def test_every_variable_that_is_read_is_on_the_page(generate):
    rooms = ("common", "commands", "pytorch", "tensorflow")
    files = [path for room in rooms for path in (REPOSITORY / room).rglob("*.py") if "patches" not in path.parts]
    read = {name for path in files for pair in READ.findall(path.read_text()) for name in pair if name}
    for path in (REPOSITORY / "common" / "launch").glob("*.py"):
        constants = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
        read |= {value for value in constants if isinstance(value, str) and re.fullmatch(r"[A-Z]+_[A-Z_]+", value)}
    listed = set(re.findall(r"`([A-Za-z_]+)`", generate.variables.page()))
    parts_of_names = {"JSM_NAMESPACE", "LOCAL_SIZE", "MV2_COMM_WORLD", "OMPI_COMM_WORLD"}
    assert len(read) > 50
    assert read - listed - parts_of_names == set()


def test_every_public_name_is_on_the_page_of_the_interface():
    page = (REPOSITORY / "docs" / "api.md").read_text()
    for name in ("allstep", "allstep.pytorch", "allstep.tensorflow"):
        for public in set(importlib.import_module(name).__all__) - {"__version__"}:
            assert re.search(
                rf":: {re.escape(name)}\.{public}$|^## {re.escape(name)}\.{public}$", page, re.MULTILINE
            ), public


def test_every_command_that_ends_with_status_1_is_on_the_page_of_statuses():
    rows = set(re.findall(r"^\| `allstep (\S+?)[` ]", (REPOSITORY / "docs" / "statuses.md").read_text(), re.MULTILINE))
    folder = REPOSITORY / "commands"
    assert rows == {path.parent.name for path in folder.glob("*/*.py") if "sys.exit(1)" in path.read_text()}


def test_every_field_of_an_event_is_on_the_page_of_files():
    """Fields are keywords of `reporter.event`, and keys of the metrics that strategies and flags add."""
    rows = re.findall(r"^\| `(?:start|step|epoch|end)`.*", (REPOSITORY / "docs" / "files.md").read_text(), re.MULTILINE)
    training = REPOSITORY / "common" / "training"
    nodes = [
        node
        for name in ("engine", "training_run")
        for node in ast.walk(ast.parse((training / f"{name}.py").read_text()))
    ]
    calls = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "event"]
    fields = {keyword.arg for call in calls for keyword in call.keywords if keyword.arg}
    sources = [
        path for room in ("common/training", "pytorch", "tensorflow") for path in (REPOSITORY / room).rglob("*.py")
    ]
    text = "\n".join(path.read_text() for path in sources)
    for body in re.findall(r"def _?metrics\(.*?(?=\n\S|\n    def |\Z)", text, re.DOTALL):
        fields |= set(re.findall(r'"(\w+)"(?:: |\] = )', body))
    assert {"weights_checksum", "gradient_noise_scale", "staleness_max", "unreadable_images"} < fields
    assert {field for field in fields if not re.search(rf"\b{field}\b", "\n".join(rows))} == set()


def test_figures_are_those_that_their_scripts_draw(monkeypatch):
    folder = REPOSITORY / "docs" / "figures"
    monkeypatch.syspath_prepend(folder)
    draw = importlib.import_module("draw")
    old = [file for file, module in draw.FIGURES.items() if (draw.DOCS / file).read_text() != module.figure()]
    assert old == [], "run python docs/figures/draw.py"
    drawn = {module.__name__ for module in draw.FIGURES.values()}
    assert drawn == {path.stem for path in folder.glob("*.py")} - {"draw", "drawing"}


def test_a_ring_adds_every_part_once_on_every_rank(monkeypatch):
    """The figure is that of a real all-reduce: after six steps all parts of all ranks are sums over four."""
    monkeypatch.syspath_prepend(REPOSITORY / "docs" / "figures")
    *_, last = importlib.import_module("ring").steps()
    assert last == [[{0, 1, 2, 3}] * 4] * 4


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return a folder with the site; it takes a minute."""
    if importlib.util.find_spec("sphinx") is None:
        skip("this environment lacks sphinx: pip install -r docs/requirements.txt")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", f"{folder}/.trees", "docs", folder]
    built = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Print no line for each file."""


@contextmanager
def served(folder):
    """Serve a folder to this machine, and yield its address."""
    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.full
def test_links_inside_lead_to_pages_and_those_outside_are_listed(site, monkeypatch):
    """Sphinx warns of unknown pages and headings; this sees links that are shown as plain text, or leave the site."""
    monkeypatch.syspath_prepend(SITE)
    outside = importlib.import_module("links").outside
    start = html.unescape((site / "index.html").read_text())
    assert [link for link in re.findall(r'href="([^":#?]+)["#?]', start) if not (site / link).exists()] == []
    assert "allstep.pytorch.Session" in (site / "api.html").read_text()
    assert 'href="../bits.html"' in (site / "measurements" / "slices.html").read_text()
    assert outside(site)["https://arxiv.org/abs/1802.05799"] == ["explanation/all-reduce.html"]
    assert 'href="../five-steps.html"' in (site / "tutorial" / "two-ranks.html").read_text()


@pytest.mark.full
def test_a_browser_shows_the_site_at_any_width_without_an_error(site, tmp_path):
    """The pages come from a server, as a reader's do; screenshots are kept."""
    need("chromium")
    with served(site) as address, chromium(tmp_path) as tab:
        for page, width, is_dark in itertools.product(PAGES, WIDTHS, (False, True)):
            query = "?q=learning+rate" if page == "search" else ""
            tab.open(f"{address}/{page}.html{query}", width=width, dark=is_dark)
            if page == "search":
                assert "two-ranks" in tab.run(FOUND) or "learning-rate" in tab.run(FOUND)
            tab.screenshot(ARTEFACTS / f"{page.replace('/', '-')}-{width}-{'dark' if is_dark else 'light'}.png")
            assert (page, tab.errors, tab.run(CUT_OFF)) == (page, [], [])
            assert tab.run("document.documentElement.scrollWidth") <= width
            assert tab.run("[...document.images].filter(image => !image.naturalWidth).map(image => image.src)") == []
