"""Pages of the site that are written from the code. Oracles: tyro's --help, the source's text, and Sphinx itself."""

from __future__ import annotations

import ast
import html
import importlib.util
import re
import subprocess
import sys

import pytest
from ranks import REPOSITORY
from requirements import skip

from allstep.commands.cli import COMMANDS
from allstep.common.config.train_config import TrainConfig

SITE = REPOSITORY / "docs" / "site"
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


@pytest.mark.parametrize("script", sorted((REPOSITORY / "docs" / "figures").glob("*.py")), ids=lambda path: path.stem)
def test_figures_are_those_that_their_scripts_draw(script, monkeypatch):
    monkeypatch.syspath_prepend(script.parent)
    module = importlib.import_module(script.stem)
    if script.stem != "drawing":
        assert module.FILE.read_text() == module.figure(), f"run python {script.relative_to(REPOSITORY)}"


def test_a_ring_adds_every_part_once_on_every_rank(monkeypatch):
    """The figure is that of a real all-reduce: after six steps all parts of all ranks are sums over four."""
    monkeypatch.syspath_prepend(REPOSITORY / "docs" / "figures")
    *_, last = importlib.import_module("ring").steps()
    assert last == [[{0, 1, 2, 3}] * 4] * 4


@pytest.mark.full
def test_site_is_built_without_a_warning(tmp_path):
    if importlib.util.find_spec("sphinx") is None:
        skip("this environment lacks sphinx: pip install -r docs/requirements.txt")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", tmp_path / "trees", "docs", tmp_path]
    built = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    start = html.unescape((tmp_path / "index.html").read_text())
    assert [link for link in re.findall(r'href="([^":#?]+)["#?]', start) if not (tmp_path / link).exists()] == []
    assert "allstep.pytorch.Session" in (tmp_path / "api.html").read_text()
