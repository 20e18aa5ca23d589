"""Output to the terminal: lines written in one piece, and safe quoting of untrusted text."""

import sys
from typing import TextIO

from allstep.common.base.errors import printable


def print_line(text: str, file: TextIO | None = None) -> None:
    """Write a line to `file`, by default standard output; characters that command terminals are escaped.

    Launchers set PYTHONUNBUFFERED, and print() then writes the line break separately: output of another rank may come
    in between, and so may the rank's name that mpirun puts before each piece of output.
    """
    stream = file or sys.stdout
    stream.write(f"{visible(text)}\n")
    stream.flush()


def warn(message: str) -> None:
    """Print a warning to standard error, in one line."""
    note(f"warning: {message}")


def note(message: str) -> None:
    """Print something about the run to standard error, in one line."""
    print_line(f"allstep: {printable(message)}", sys.stderr)


def visible(text: str) -> str:
    """Return text with all but its line breaks escaped as `printable` does."""
    return "\n".join(map(printable, text.split("\n")))


def quoted(text: str | None) -> str:
    """Return untrusted text for a message: cut, quoted, in ASCII, and without terminal control codes."""
    if text is None:
        return "nothing"
    return ascii(text) if len(text) <= _MAX_QUOTED else f"{ascii(text[:_MAX_QUOTED])}... ({len(text)} characters)"


_MAX_QUOTED = 60
