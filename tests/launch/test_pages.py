"""Commands in README.md and the pages of docs/, run one after the other. Oracle: all end with status 0.

Outputs that pages show must be those that their commands have now. A command with the comment `(needs a cluster)` or
`(needs GPUs)` is not run; one with `(minutes)` is `full`. tests/cluster/test_tutorial.py has what needs hosts.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from ranks import REPOSITORY, full, run

DOCS = REPOSITORY / "docs"
FOLDERS = ("", "how-to", "explanation", "measurements")
PAGES = [REPOSITORY / "README.md", REPOSITORY / "hostfiles" / "README.md"]
PAGES += [path for place in FOLDERS for path in sorted((DOCS / place).glob("*.md"))]
TUTORIAL = sorted((DOCS / "tutorial").glob("*.md"))
# `make test` would run this test, and the tests of the trainers cover `make train`.
NOT_TYPED = re.compile(r"\((needs a cluster|needs GPUs)\)|^make ")


def commands(page: Path, *, minutes: bool) -> Iterator[str]:
    """Yield the commands to run in a page's shell blocks; with `minutes` also those that take minutes."""
    for block in re.findall(r"^ *```sh\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            if not NOT_TYPED.search(line) and (minutes or "(minutes)" not in line):
                yield line


@pytest.fixture
def outputs(monkeypatch) -> ModuleType:
    """Return the module that runs commands and writes what they print."""
    monkeypatch.syspath_prepend(DOCS / "site")
    return importlib.import_module("outputs")


def type_all(page: Path, folder: Path, outputs: ModuleType, *, minutes: bool) -> None:
    checkout = outputs.checkout(folder)
    outputs.write_files(page.read_text(), checkout)
    for command in commands(page, minutes=minutes):
        result = run("bash", "-c", f"cd {checkout} && {command}", timeout=1800 if minutes else 120)
        assert result.returncode == 0, f"{command}\n{result.output}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if list(commands(page, minutes=False))], ids=lambda page: page.stem
)
def test_commands(page, tmp_path, outputs):
    type_all(page, tmp_path, outputs, minutes=False)


@pytest.mark.parametrize(
    "page", [full(page) for page in PAGES if "(minutes)" in page.read_text()], ids=lambda page: page.stem
)
def test_commands_that_take_minutes(page, tmp_path, outputs):
    type_all(page, tmp_path, outputs, minutes=True)


@pytest.mark.launch
@pytest.mark.parametrize("name", ["README.md", *(full(f"docs/tutorial/{path.name}") for path in TUTORIAL)])
def test_outputs_on_the_page_are_those_of_its_commands(name, tmp_path, outputs):
    page = (REPOSITORY / name).read_text()
    assert len(outputs.BLOCK.findall(page)) == page.count("```text")
    assert list(outputs.differences(page, outputs.checkout(tmp_path))) == []


def test_links_lead_somewhere():
    pages = [*PAGES, *TUTORIAL, REPOSITORY / "ARCHITECTURE.md", REPOSITORY / "CONTRIBUTING.md"]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())]
    assert len(links) > 10
    assert [link for page, link in links if not (page.parent / link).exists()] == []


def test_every_page_says_what_kind_it_is():
    kind = re.compile(r"^# .+\n\n[^\n]*\b(tutorial|how-to|explanation|reference|measurement)", re.IGNORECASE)
    pages = {page for page in DOCS.rglob("*.md") if "generated" not in page.parts} - {DOCS / "index.md"}
    assert len(pages) > 40
    assert sorted(page.stem for page in pages if not kind.search(page.read_text())) == []
