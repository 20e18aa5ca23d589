"""Messages to the user: errors that end a run early (mistakes: exit status 2; faults: 1), and other lines."""

import difflib
import re
import sys
from collections.abc import Iterable
from typing import TextIO

_LONGEST_SHOWN, _MAX_QUOTED = 200, 60


class UserError(Exception):
    """Wrong input. The message is one line: what was expected, what was received, what to do."""

    def __str__(self) -> str:
        return printable(super().__str__())


class Fault(Exception):
    """Failure of a run despite correct input. The message names the rank, the step and the cause."""


class RanksLost(Fault):
    """Loss of other ranks, which ends a job unless it is elastic."""


def printable(text: str) -> str:
    """Return text with characters such as line breaks and terminal control codes escaped, so that it is one line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# Keras puts the cause in bold, and the arguments of the layer's call after it; TensorFlow ends with the graph's node.
_BOLD = re.compile(r"\x1b\[[0-9;]*m")
_AFTER_THE_CAUSE = re.compile(r"^(Arguments received by |\s*\[\[\{\{node )", re.MULTILINE)


def summary(error: BaseException) -> str:
    """Return an exception in one line: its type and the last line about its cause."""
    text = _BOLD.sub("", str(error)).strip()
    causes = _AFTER_THE_CAUSE.split(text)[0].strip() or text
    return f"{type(error).__name__}: {causes.splitlines()[-1].strip()}" if causes else type(error).__name__


def first_paragraph(error: BaseException) -> str:
    """Return an exception in one line: its type and the first paragraph of its message, as exporters put it."""
    text = " ".join(_BOLD.sub("", str(error)).strip().partition("\n\n")[0].split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def quote(given: object) -> str:
    """Return user input for a message in one line: long input is cut, blank or unprintable input is quoted."""
    text = str(given)
    cut = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}... ({len(text)} characters)"
    return cut if text.strip() and cut.isprintable() else ascii(cut)


def did_you_mean(word: str, names: Iterable[str], otherwise: str = "") -> str:
    """Return advice on a word that is none of `names`: the name most like it, or else `otherwise`."""
    near = difflib.get_close_matches(word, [*names], n=1)
    return f"did you mean {near[0]}?" if near else otherwise


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
