"""Result files: JSON with a format and its version, written atomically and read as records."""

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Protocol, TypeVar

from allstep.common.base.errors import UserError, quote
from allstep.common.base.flag_types import nonempty_path
from allstep.common.files import strict_json
from allstep.common.files.disk import named_by_user, read_regular, try_file, write_atomically
from allstep.common.files.strict_json import Mismatch, NotJson, brief, from_json, to_json

_LARGEST_FILE = 16 * 2**20  # ten times the size of a long comparison


class Result(Protocol):
    """A frozen dataclass that has its own file."""

    FORMAT: ClassVar[str]
    VERSION: ClassVar[int]


RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT", bound=Result)


def command(name: str, argv: Sequence[str] | None) -> str:
    """Return the shell line that repeats a command of `allstep` with the arguments of its `main`."""
    return shlex.join(["allstep", name, *(sys.argv[1:] if argv is None else argv)])


def now() -> str:
    """Return the time as results have it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def write_json(path: Path, record: Any) -> None:
    """Write a record without format and version, for another process of ours to read once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(to_json(record), allow_nan=False))


def read_json(kind: type[RecordT], path: Path) -> RecordT:
    """Read a record that `write_json` wrote."""
    return from_json(kind, load(path), path.name)


def write(path: Path, result: Result) -> None:
    """Write a result as JSON to `path`, with its format and version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": result.FORMAT, "version": result.VERSION, **to_json(result)}
    text = json.dumps(content, indent=1, allow_nan=False)
    with write_atomically(path) as stream:
        stream.write(f"{text}\n".encode())
        stream.flush()
        os.fsync(stream.fileno())


def write_output(path: Path, result: Result) -> None:
    """Write a result to the user's file. Raises UserError if the file cannot be written."""
    try:
        write(path, result)
    except OSError as error:
        raise UserError(f"expected a file to write for --output, received {path}: {error}") from None


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Open a stream whose content replaces the user's file when the block ends; an earlier file stays if it fails.

    Raises UserError if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(path) as stream:
            yield stream
    except OSError as error:
        raise UserError(f"expected to write {path}, received the error: {error.strerror}; name another file") from None


def output_file(text: str) -> Path:
    """Convert a flag to a path for results, and check that it can be written before anything is measured."""
    path = named_by_user(nonempty_path(text))
    try:
        try_file(path)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"to be a file that can be written, received {quote(text)}: {error.strerror}; name another"
        ) from None
    return path


def read(kind: type[ResultT], path: Path) -> ResultT:
    """Read the result in a file.

    Raises OSError if it cannot be read, NotJson if it is half-written or no JSON, OtherFormat if it is of another kind
    or of another version, Mismatch if the content does not have the shape of the format.
    """
    content = load(path)
    check_version(kind, content)
    return from_json(kind, content, "result")


def read_input(kind: type[ResultT], path: Path) -> ResultT:
    """Read a result file that a user named.

    Raises UserError if it is missing, half-written, or of another kind, version or shape.
    """
    try:
        return read(kind, path)
    except (OSError, NotJson) as error:
        raise UserError(f"expected a readable {kind.FORMAT} file, received {path}: {error}") from None
    except OtherFormat as error:
        raise UserError(f"{path}: {error}; measure again, or read it with the allstep that wrote it") from None
    except Mismatch as error:
        raise UserError(f"{path} is no {kind.FORMAT} file: {error}; measure again") from None


def load(path: Path) -> Any:
    """Read the JSON in an untrusted file.

    Raises OSError if it is not regular, is larger than any result, or cannot be read; NotJson if it is no JSON.
    """
    return strict_json.loads(read_regular(path, maximum=_LARGEST_FILE))


class OtherFormat(ValueError):
    """Raised for another format or version than expected; the message names both."""


def formats(kind: type[Result]) -> tuple[str, ...]:
    """Return the names under which a kind of result is read: its format, then the former names in `FORMER_FORMATS`."""
    return kind.FORMAT, *getattr(kind, "FORMER_FORMATS", ())


def check_version(kind: type[Result], content: Any) -> None:
    """Check that JSON declares this kind and version. Raises OtherFormat if it does not."""
    found = (content.get("format"), content.get("version")) if isinstance(content, dict) else None
    if found is None or found[0] not in formats(kind) or found[1] != kind.VERSION:
        received = brief(found) if found else type(content).__name__
        if found and re.fullmatch(r"allstep-[a-z]+", str(found[0])) and isinstance(found[1], int):
            received = f"{found[0]} {brief(found[1])}"
        raise OtherFormat(f"expected {kind.FORMAT} {kind.VERSION}, received {received}")
