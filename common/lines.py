"""Lines for the terminal, each written in one piece."""

from __future__ import annotations

import sys
from typing import TextIO


def print_line(text: str, file: TextIO | None = None) -> None:
    """Write a line to `file`, by default standard output.

    Launchers set PYTHONUNBUFFERED, and print() then writes the end of a line by itself: what another rank says may come
    between, and so may the rank's name that mpirun puts before whatever it passes on.
    """
    file = file or sys.stdout
    file.write(f"{text}\n")
    file.flush()
