"""The files of a comparison: one a launch, written whole or not at all, and read again by who goes on with it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from allstep.common.errors import UserError

FORMAT, VERSION = "allstep-compare", 1
SUMMARY = "compare.json"


def write(path: Path, content: dict) -> None:
    """Write `content` as JSON under the name `path`, with the format and its version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    text = json.dumps({"format": FORMAT, "version": VERSION, **content}, indent=1, allow_nan=False)
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read(path: Path) -> dict | None:
    """What was written under that name; None where nothing was, or what is there is broken, which is told.

    Raises:
        UserError: it is of another program or of another version of this one.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warn(f"{path} cannot be read ({error}); it is measured again")
        return None
    found = (content.get("format"), content.get("version")) if isinstance(content, dict) else None
    if found != (FORMAT, VERSION):
        received = f"{found[0]} {found[1]}" if found else type(content).__name__
        raise UserError(f"expected {FORMAT} {VERSION} in {path}, received {received}; give another --output-dir")
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
