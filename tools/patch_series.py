"""The patches to Horovod: how they are read, ordered and applied.

tools/horovod_patches/ has three folders: `build`, without which Horovod does not compile, `correct`, without which it
is wrong, and `better`, which make it faster or friendlier. The numbers of the files are one order over all folders.

The source is pinned by its checksum, so a patch fits at its very lines or is refused. That is why neither GNU patch is
used, which every machine would need and which looks for other places, nor patch-ng, which takes a patch that is in the
source already for applied.

A line `{{NAME}}` that a patch adds stands for the file NAME in tools/horovod_patches/inserted/, where it can be read
and checked as what it is. It is filled in after the last patch, so that it may grow without moving the lines of others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PATCHES = Path(__file__).with_name("horovod_patches")
GROUPS = ("build", "correct", "better")
_RANGES = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_PLACE = re.compile(r"^\{\{(\w+\.\w+)\}\}$", re.MULTILINE)


class PatchFailed(Exception):
    """A patch does not fit the source, or is none."""


@dataclass(frozen=True, kw_only=True)
class Hunk:
    path: str  # of the file, from the root of the source
    start: int  # the first of its lines, counted from 1
    old: list[str]  # these lines of the file
    new: list[str]  # become these


@dataclass(frozen=True, kw_only=True)
class Patch:
    name: str  # of its file
    header: str  # for readers: what and why, and where upstream knows of it
    hunks: list[Hunk]


def series(groups: Iterable[str] = GROUPS) -> list[Patch]:
    """The patches of these groups in their order.

    Raises:
        PatchFailed: a file holds no patch.
    """
    files = [file for group in groups for file in (PATCHES / group).glob("*.patch")]
    return [parse(file.name, file.read_bytes().decode()) for file in sorted(files, key=lambda file: file.name)]


def inserted() -> dict[str, str]:
    """The texts that patches name, by that name."""
    return {file.name: file.read_bytes().decode() for file in sorted((PATCHES / "inserted").iterdir())}


def parse(name: str, text: str) -> Patch:
    """A patch from the text of its file: a header, then a unified diff of paths a/PATH and b/PATH.

    Raises:
        PatchFailed: it is something else.
    """
    header, found, diff = text.removesuffix("\n").partition("\n--- ")
    if not found:
        raise PatchFailed(f"{name}: expected a unified diff, received none")
    return Patch(name=name, header=header, hunks=list(_hunks(name, iter(f"--- {diff}".split("\n")))))


def apply_patches(source: Path, patches: Iterable[Patch]) -> None:
    """Apply the patches in order to the tree at `source`.

    Raises:
        PatchFailed: the first that does not fit.
    """
    touched = set()
    for patch in patches:
        for path in dict.fromkeys(hunk.path for hunk in patch.hunks):
            file = source / path
            if not file.exists():
                raise PatchFailed(f"{patch.name}: expected the file {path}, received a source without it")
            hunks = [hunk for hunk in patch.hunks if hunk.path == path]
            file.write_bytes(_patched(patch.name, file.read_bytes().decode(), hunks).encode())
            touched.add(file)
    texts = inserted()
    for file in touched:
        text = file.read_bytes().decode()
        file.write_bytes(_PLACE.sub(lambda placement: texts[placement[1]].removesuffix("\n"), text).encode())


def _patched(name: str, text: str, hunks: list[Hunk]) -> str:
    lines = text.split("\n")
    result, done = [], 0
    for hunk in hunks:
        start = hunk.start - 1
        if start < done or lines[start : start + len(hunk.old)] != hunk.old:
            raise PatchFailed(f"{name}: expected its lines in {hunk.path} from line {hunk.start} on, received others")
        result += lines[done:start] + hunk.new
        done = start + len(hunk.old)
    return "\n".join(result + lines[done:])


def _hunks(name: str, lines: Iterator[str]) -> Iterator[Hunk]:
    """The lines after an @@ are counted, for one that is removed may look like the head of the next file."""
    path = ""
    for line in lines:
        if line.startswith("--- a/"):
            path = line.removeprefix("--- a/").partition("\t")[0]  # diff writes a date after it
            if next(lines, "").partition("\t")[0] != f"+++ b/{path}":
                raise PatchFailed(f"{name}: expected +++ b/{path} after --- a/{path}, received another line")
        elif path and (found := _RANGES.match(line)):
            num_old, num_new = int(found[2] or 1), int(found[3] or 1)
            old, new = _sides(name, lines, num_old, num_new)
            yield Hunk(path=path, start=int(found[1]), old=old, new=new)
        elif not line.startswith(("diff ", "index ")):
            raise PatchFailed(f"{name}: expected --- a/PATH or @@ in its diff, received {line!r}")


def _sides(name: str, lines: Iterator[str], num_old: int, num_new: int) -> tuple[list[str], list[str]]:
    if num_old == 0:
        raise PatchFailed(f"{name}: expected lines around each change, received a hunk without any")
    old, new = [], []
    while len(old) < num_old or len(new) < num_new:
        line = next(lines, "")
        if not line.startswith((" ", "-", "+")):
            raise PatchFailed(f"{name}: expected a line that begins with a blank, - or +, received {line!r}")
        if line[0] != "+":
            old.append(line[1:])
        if line[0] != "-":
            new.append(line[1:])
    return old, new
