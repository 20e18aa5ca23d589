"""Lines for the terminal: each written in one piece, and safe whatever it quotes."""

from __future__ import annotations

import sys
from typing import TextIO


def print_line(text: str, file: TextIO | None = None) -> None:
    """Write a line to `file`, by default standard output.

    Launchers set PYTHONUNBUFFERED, and print() then writes the end of a line by itself: what another rank says may come
    between, and so may the rank's name that mpirun puts before whatever it passes on.
    """
    stream = file or sys.stdout
    stream.write(f"{text}\n")
    stream.flush()


def warn(message: str) -> None:
    """One line on standard error about something that a run or a command can live with."""
    print_line(f"allstep: warning: {message}", sys.stderr)


def quoted(text: str | None) -> str:
    """What a stranger may have written, for a line: short, in ASCII, and without anything that a terminal obeys."""
    if text is None:
        return "nothing"
    return ascii(text) if len(text) <= _MOST_QUOTED else f"{ascii(text[:_MOST_QUOTED])}... ({len(text)} characters)"


_MOST_QUOTED = 60
