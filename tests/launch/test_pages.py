"""Commands in README.md and the pages of docs/, run one after the other. Oracle: all end with status 0.

Outputs that pages show must be those that their commands have now. A command with a comment such as `(needs GPUs)` is
not run, nor is a block that begins with one; a command with `(minutes)` is `full`. tests/cluster/test_tutorial.py has
what needs hosts. Trainers train two epochs where the page says nothing about epochs, except with `pytest -m full`,
which runs all as it stands.
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
WITH_OUTPUTS = [
    str(path.relative_to(REPOSITORY)) for path in [*PAGES[2:], *TUTORIAL] if "```text\n" in path.read_text()
]
# `make test` would run this test, and the tests of the trainers cover `make train`.
NOT_TYPED = re.compile(r"\(needs [^)]+\)|^make ")
BLOCK = re.compile(r"^ *```([^\n]*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
EPOCHS = re.compile(r"train\.py(?!.*--epochs)")
# Commands that `make test` runs elsewhere.
ELSEWHERE = {
    "horovodrun -np 2 python examples/keras_fit.py": "tests/tensorflow/test_horovod_keras.py::test_example",
    "python examples/own_loop_horovod.py runs/own-loop": "tests/launch/test_program.py::"
    "test_a_loop_by_hand_goes_on_at_the_sample_on_other_ranks",
    'horovodrun -np 2 python pytorch/train.py | grep -E "Epoch = ( 1|10):"': "tests/launch/test_pages.py::"
    "test_outputs_on_the_page_are_those_of_its_commands",
    "python tensorflow/train.py --list-strategies": "tests/tensorflow/test_strategies.py::test_list_strategies",
    # The next command of the page runs the same file on two ranks, and README.md's Session trains in one process.
    "python examples/session_pytorch.py": "tests/launch/test_pages.py::test_commands",
}


def commands(page: Path, *, minutes: bool) -> Iterator[str]:
    """Yield the commands to run in a page's shell blocks; with `minutes` as they stand, and those that take minutes."""
    for language, block in BLOCK.findall(page.read_text()):
        if language != "sh" or block.startswith("# (needs "):
            continue
        for line in block.splitlines():
            if minutes and not NOT_TYPED.search(line):
                yield line
            elif not NOT_TYPED.search(line) and "(minutes)" not in line and line not in ELSEWHERE:
                yield EPOCHS.sub("train.py --epochs 2", line)


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
    "page",
    [full(page) for page in PAGES if list(commands(page, minutes=True)) != list(commands(page, minutes=False))],
    ids=lambda page: page.stem,
)
def test_all_commands_as_they_stand(page, tmp_path, outputs):
    type_all(page, tmp_path, outputs, minutes=True)


@pytest.mark.launch
@pytest.mark.parametrize("name", ["README.md", *map(full, WITH_OUTPUTS)])
def test_outputs_on_the_page_are_those_of_its_commands(name, tmp_path, outputs):
    page = (REPOSITORY / name).read_text()
    assert len(outputs.BLOCK.findall(page)) == page.count("```text")
    assert list(outputs.differences(page, outputs.checkout(tmp_path))) == []


def test_commands_that_run_elsewhere_stand_on_a_page_and_have_their_test():
    assert set(ELSEWHERE) <= {command for page in PAGES for command in commands(page, minutes=True)}
    for name in ELSEWHERE.values():
        file, _, test = name.partition("::")
        assert f"def {test}(" in (REPOSITORY / file).read_text()


def test_every_block_says_what_it_is():
    """A block of commands is `sh`, so that the tests above run it, or it says what it needs."""
    blocks = [(page.name, *block) for page in [*PAGES, *TUTORIAL] for block in BLOCK.findall(page.read_text())]
    assert [block for block in blocks if not re.fullmatch(r"sh|text|python|yaml|json|\{[a-z-]+\}.*", block[1])] == []


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
