"""Patches to Horovod: reading, ordering and applying them.

patches/ has three folders: `build`, needed to compile Horovod, `correct`, which fix bugs, and `better`,
which make it faster or friendlier. The numbers of the files define one order over all folders.

The source is pinned by its checksum, so a patch must match at exactly its lines. GNU patch is not used, since it would
have to be installed and searches for other places; nor is patch-ng, which accepts a patch that the source already
contains.

A line `{{NAME}}` that a patch adds stands for the file NAME in patches/inserted/, where tools can check
it in its own language. It is inserted after the last patch, so that it can grow without shifting lines for others.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from allstep.common.files.disk import texts

PATCHES = Path(__file__).with_name("patches")
GROUPS = ("build", "correct", "better")
_FILE = re.compile(r"--- a/([^\t]+)")
_RANGES = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_INSERTION = re.compile(r"^\{\{(\w+\.\w+)\}\}$", re.MULTILINE)


class PatchFailed(Exception):
    """A patch that is malformed or does not fit the source."""


@dataclass(frozen=True, kw_only=True)
class Hunk:
    """Lines of a file that a patch replaces."""

    path: str  # file, relative to the root of the source
    start: int  # first line, counted from 1
    old: list[str]  # lines to replace
    new: list[str]  # lines to insert
    num_before: int  # lines that stay before the first change
    num_behind: int  # and behind the last one

    def change(self) -> tuple[str, int, list[str], list[str]]:
        """Return path, start, old and new lines without those that stay at both ends, of which a wheel has fewer."""
        old, new = (lines[self.num_before : len(lines) - self.num_behind] for lines in (self.old, self.new))
        return self.path, self.start + self.num_before, old, new


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A patch file."""

    name: str  # name of its file
    header: str  # explanation for readers, with links to upstream issues
    hunks: list[Hunk]


def series(groups: Iterable[str] = GROUPS) -> list[Patch]:
    """Return the patches of these groups in order. Raises PatchFailed if a file is not a patch."""
    found = (name.split("/") for name in texts(PATCHES) if name.endswith(".patch"))
    ordered = sorted((name, group) for group, name in found if group in groups)
    return [parse(name, texts(PATCHES)[f"{group}/{name}"]) for name, group in ordered]


def inserted() -> dict[str, str]:
    """Return the texts that patches refer to, by name."""
    return {
        name.removeprefix("inserted/"): text for name, text in texts(PATCHES).items() if name.startswith("inserted/")
    }


def parse(name: str, text: str) -> Patch:
    """Parse the text of a patch file: a header, then a unified diff of paths a/PATH and b/PATH.

    Raises PatchFailed if the text has another form.
    """
    header, _, diff = text.removesuffix("\n").partition("\n--- ")
    lines, hunks, path = f"--- {diff}".split("\n"), [], None
    while lines:
        line, following = lines.pop(0), lines[0] if lines else ""
        if (found := _FILE.match(line)) and re.match(rf"\+\+\+ b/{re.escape(found[1])}(\t|$)", following):
            path = found[1]
            del lines[0]
        elif path and (found := _RANGES.match(line)):
            sizes, old, new, signs = (int(found[2] or 1), int(found[3] or 1)), [], [], ""
            # Lines are counted, since a removed one may look like the next file's header.
            while lines and lines[0].startswith((" ", "-", "+")) and (len(old), len(new)) != sizes:
                line = lines.pop(0)
                signs += line[0]
                old += [line[1:]] * (line[0] != "+")
                new += [line[1:]] * (line[0] != "-")
            if not old or (len(old), len(new)) != sizes:
                raise PatchFailed(f"{name}: expected {sizes} lines with some around each change, received other ones")
            around = {"num_before": len(signs) - len(signs.lstrip()), "num_behind": len(signs) - len(signs.rstrip())}
            hunks.append(Hunk(path=path, start=int(found[1]), old=old, new=new, **around))
        elif not line.startswith(("diff ", "index ")):
            raise PatchFailed(f"{name}: expected a unified diff of a/PATH and b/PATH, received {line!r}")
    return Patch(name=name, header=header, hunks=hunks)


def apply_patches(source: Path, patches: Iterable[Patch]) -> None:
    """Apply the patches in order to the tree at `source`. Raises PatchFailed for the first one that does not fit."""
    touched = set()
    for patch in patches:
        for path in dict.fromkeys(hunk.path for hunk in patch.hunks):
            file = source / path
            if not file.exists():
                raise PatchFailed(f"{patch.name}: expected the file {path}, received a source without it")
            hunks = [hunk for hunk in patch.hunks if hunk.path == path]
            file.write_bytes(_patched(patch.name, file.read_bytes().decode(), hunks).encode())
            touched.add(file)
    for file in touched:
        text = file.read_bytes().decode()
        file.write_bytes(_INSERTION.sub(lambda found: inserted()[found[1]].removesuffix("\n"), text).encode())


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
