"""Output of the commands in README.md, the tutorial and the how-tos: `python docs/site/outputs.py` runs and writes it.

A shell block that a block of text follows is run in a copy of the checkout's folders, and what it prints on stdout is
the text. A Python block whose first line is a file's name is that file. Blocks that name hosts or a cluster which they
need run only with `--hosts`, as root, on simulated hosts; the others run only without it. Tests run the blocks again
and compare everything but the numbers.
"""

import datetime
import functools
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from allstep.common.base.version import VERSION

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = (
    REPOSITORY / "README.md",
    *sorted((REPOSITORY / "docs" / "tutorial").glob("*.md")),
    *sorted((REPOSITORY / "docs" / "how-to").glob("*.md")),
    REPOSITORY / "docs" / "clusters.md",
)
FOLDERS = ("pytorch", "tensorflow", "hostfiles", "examples", ".venv")
"""Folders of the repository that commands read."""
TWO_HOSTS = (str(REPOSITORY / "tests" / "cluster" / "two_hosts.sh"), "2")
BEDS = {
    "(needs two hosts)": TWO_HOSTS,
    "(needs Slurm)": (*TWO_HOSTS, str(REPOSITORY / "tests" / "cluster" / "slurm.sh"), "2"),
}
"""Programs that run the blocks which have these words in a comment."""
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
"""Variables without which mpirun refuses to run on simulated hosts, where the user is root."""
FILE = re.compile(r"^```python\n# (?P<name>\w+\.py)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"(?P<head>^```sh\n(?P<commands>[^`]*?)^```\n\n```text\n)(?P<output>[^`]*?)^```$", re.MULTILINE)
HOME = "/home/you/allstep"
"""Path of the checkout on the pages."""
DATE = re.compile(r"^\*Printed on .*\*$", re.MULTILINE)
MEASURED = re.compile(r"(Time|sec|equal to|after step|at step)( =)? +[\d.e+-]+")
"""Numbers that differ between runs and machines: times, speeds, differences in the last bits, steps of a kill."""
NUMBER = re.compile(r"\d+(?:\.\d+)?")
TOLERANCE = 0.02
"""Largest difference of other numbers, since processors round differently."""


def with_outputs(page: str, folder: Path, *, hosts: bool) -> str:
    """Return a page with the outputs that its commands have now, and with today's date."""
    write_files(page, folder)
    found = {match.start(): output(match["commands"], folder) for match in blocks(page, hosts=hosts)}
    today = f"*Printed on {datetime.date.today():%-d %B %Y} by allstep {VERSION} on a CPU with other load.*"
    page = BLOCK.sub(lambda match: f"{match['head']}{found.get(match.start(), match['output'])}```", page)
    return DATE.sub(today, page) if found else page


def differences(page: str, folder: Path, *, hosts: bool = False) -> Iterator[str]:
    """Run a page's commands and yield those whose output is no longer that of the page."""
    write_files(page, folder)
    for match in blocks(page, hosts=hosts):
        now = output(match["commands"], folder)
        if not is_same(match["output"], now):
            yield f"{match['commands']}{now}"


def blocks(page: str, *, hosts: bool) -> Iterator[re.Match[str]]:
    """Yield the shell blocks of a page that are followed by their output and need simulated hosts, or do not."""
    return (match for match in BLOCK.finditer(page) if hosts == (bed(match["commands"]) != ()))


def bed(commands: str) -> tuple[str, ...]:
    """Return the words that start commands on the hosts that they need; none on this machine."""
    return next((words for mark, words in BEDS.items() if mark in commands), ())


def write_files(page: str, folder: Path) -> None:
    """Write the files that a page shows."""
    for match in FILE.finditer(page):
        (folder / match["name"]).write_text(match["text"])


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
        [*bed(commands), "bash", "-eo", "pipefail", "-c", commands],
        cwd=folder,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **(AS_ROOT if bed(commands) else {})},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return without_names(ran.stdout, folder)


def without_names(text: str, folder: Path) -> str:
    """Return a text with a reader's names in place of this machine's: its folder, environment, home and host."""
    names = {str(folder.resolve()): HOME, sys.prefix: f"{HOME}/.venv", str(REPOSITORY): HOME}
    names[str(Path.home())] = "/home/you"
    text = functools.reduce(lambda text, name: text.replace(name, names[name]), names, text)
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "laptop", text)


def checkout(folder: Path) -> Path:
    """Make a folder like the repository, to which commands may write."""
    for name in FOLDERS:
        (folder / name).symlink_to(REPOSITORY / name)
    return folder


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        place = checkout(Path(folder))
        for path in [Path(word).resolve() for word in sys.argv[1:] if word != "--hosts"] or PAGES:
            path.write_text(with_outputs(path.read_text(), place, hosts="--hosts" in sys.argv))
