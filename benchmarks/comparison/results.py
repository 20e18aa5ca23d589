"""The files of a comparison and of the commands beside it: JSON with a format and its version, written whole or not at
all, and read again by who goes on with it."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from allstep.common.config.flags import nonempty_path
from allstep.common.files import strict_json
from allstep.common.files.disk import write_atomically
from allstep.common.files.regular_file import read_regular
from allstep.common.files.schema import Mismatch, Shape, brief
from allstep.common.files.strict_json import NotJson
from allstep.common.files.writable import try_file
from allstep.common.process.errors import UserError, shown

FORMAT = "allstep-compare"
BENCHMARK = "allstep-benchmark"
VERSIONS = {FORMAT: 2, BENCHMARK: 1, "allstep-collectives": 2, "allstep-predict": 1, "allstep-validation": 1}
SUMMARY = "compare.json"
_LARGEST_FILE = 16 * 2**20  # what a long comparison leaves is a tenth of it


def command(name: str, arguments: Sequence[str]) -> str:
    """The line that repeats a command of `allstep`."""
    return shlex.join(["allstep", name, *arguments])


def write(path: Path, content: dict, kind: str = FORMAT) -> None:
    """Write `content` as JSON under the name `path`, with the format and its version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": kind, "version": VERSIONS[kind], **content}, indent=1, allow_nan=False)
    with write_atomically(path) as stream:
        stream.write(f"{text}\n".encode())
        stream.flush()
        os.fsync(stream.fileno())


def write_output(path: Path, content: dict, kind: str) -> None:
    """`write` to the file that a user named.

    Raises:
        UserError: it cannot be written.
    """
    try:
        write(path, content, kind)
    except OSError as error:
        raise UserError(f"expected a file to write for --output, received {path}: {error}") from None


def output_file(text: str) -> Path:
    """A flag's type: a file for results that can be written, which is tried before anything is measured for it."""
    path = nonempty_path(text)
    try:
        try_file(path)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"to be a file that can be written, received {shown(text)}: {error.strerror}; name another"
        ) from None
    return path


def read(path: Path, *keys: str) -> dict | None:
    """What a comparison wrote under that name; None where nothing was, or what is there is broken, which is told.

    Args:
        keys: without which it is broken.

    Raises:
        UserError: it is of another program or of another version of this one.
    """
    try:
        content = load(path)
    except FileNotFoundError:
        return None
    except (OSError, NotJson) as error:
        warn(f"{path} cannot be read ({error}); it is measured again")
        return None
    content = _checked(content, path, FORMAT, "give another --output-dir")
    if missing := [key for key in keys if key not in content]:
        warn(f"{path} lacks {', '.join(missing)}; it is measured again")
        return None
    return content


def read_input(path: Path, kind: str, shape: Shape) -> dict:
    """A result file that a user named.

    Args:
        shape: what the caller relies on.

    Raises:
        UserError: it is missing, half-written, of another kind, of another version or of another shape.
    """
    try:
        content = load(path)
    except (OSError, NotJson) as error:
        raise UserError(f"expected a readable {kind} file, received {path}: {error}") from None
    content = _checked(content, path, kind, "measure anew, or read it with the allstep that wrote it")
    try:
        shape(content, "result")
    except Mismatch as error:
        raise UserError(f"{path} is no {kind} file: {error}; measure anew") from None
    return content


def load(path: Path) -> Any:
    """The JSON in a file that somebody else may have written.

    Raises:
        OSError: it is no regular file, is larger than any result, or cannot be read.
        NotJson: it is none.
    """
    return strict_json.loads(read_regular(path, most=_LARGEST_FILE))


def _checked(content: object, path: Path, kind: str, advice: str) -> dict:
    found = (content.get("format"), content.get("version")) if isinstance(content, dict) else None
    if not isinstance(content, dict) or found != (kind, VERSIONS[kind]):
        known = found and isinstance(found[0], str) and found[0] in VERSIONS and isinstance(found[1], int)
        received = f"{found[0]} {found[1]}" if found and known else brief(found) if found else type(content).__name__
        raise UserError(f"expected {kind} {VERSIONS[kind]} in {path}, received {received}; {advice}")
    return content


def sample_path(directory: Path, cell_id: str, number: int) -> Path:
    """Where the sample of a cell's round lies."""
    return directory / "samples" / cell_id / f"{number:02d}.json"


def gate_path(directory: Path, gate_id: str) -> Path:
    """Where the verdict on a curve lies."""
    return directory / "gates" / f"{gate_id}.json"


def warn(message: str) -> None:
    """One line on standard error about what does not stop the comparison."""
    print(f"allstep: warning: {message}", file=sys.stderr, flush=True)
