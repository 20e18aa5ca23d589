"""Output of the commands on the tutorial's pages and in README.md: `python docs/site/outputs.py` runs them, writes it.

A shell block that a block of text follows is run in a copy of the checkout's folders, and what it prints on stdout is
the text. Tests run the blocks again and compare everything but the numbers.
"""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from allstep.common.base.version import VERSION

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs" / "tutorial").glob("*.md")))
FOLDERS = ("pytorch", "tensorflow", "hostfiles", "examples", ".venv")
"""Folders of the repository that commands read."""
BLOCK = re.compile(r"(?P<head>^```sh\n(?P<commands>[^`]*?)^```\n\n```text\n)(?P<output>[^`]*?)^```$", re.MULTILINE)
DATE = re.compile(r"^\*Printed on .*\*$", re.MULTILINE)
MEASURED = re.compile(r"(Time|sec|equal to)( =)? +[\d.e+-]+")
"""Numbers that differ between runs and machines: times, speeds, and differences in the last bits."""
NUMBER = re.compile(r"\d+(?:\.\d+)?")
TOLERANCE = 0.02
"""Largest difference of other numbers, since processors round differently."""


def with_outputs(page: str, folder: Path) -> str:
    """Return a page with the outputs that its commands have now, and with today's date."""
    today = f"*Printed on {datetime.date.today():%-d %B %Y} by allstep {VERSION} on a CPU with other load.*"
    page = BLOCK.sub(lambda match: f"{match['head']}{output(match['commands'], folder)}```", page)
    return DATE.sub(today, page)


def differences(page: str, folder: Path) -> Iterator[str]:
    """Run a page's commands and yield those whose output is no longer that of the page."""
    for match in BLOCK.finditer(page):
        now = output(match["commands"], folder)
        if not is_same(match["output"], now):
            yield f"{match['commands']}{now}"


def is_same(then: str, now: str) -> bool:
    """Return whether two outputs have the same words and nearly the same numbers, but for what is measured."""
    then, now = (" ".join(MEASURED.sub(r"\1", text).split()) for text in (then, now))
    numbers = zip(NUMBER.findall(then), NUMBER.findall(now), strict=False)
    return NUMBER.sub("N", then) == NUMBER.sub("N", now) and all(
        abs(float(one) - float(other)) <= TOLERANCE for one, other in numbers
    )


def output(commands: str, folder: Path) -> str:
    """Run commands in a folder and return their stdout; a command that fails ends the program that asked."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-ec", commands],
        cwd=folder,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return ran.stdout


def checkout(folder: Path) -> Path:
    """Make a folder like the repository, to which commands may write."""
    for name in FOLDERS:
        (folder / name).symlink_to(REPOSITORY / name)
    return folder


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        place = checkout(Path(folder))
        for path in PAGES:
            path.write_text(with_outputs(path.read_text(), place))
