"""Errors that end a run early: mistakes of the user (exit status 2) and faults (exit status 1)."""

import difflib
import re
from collections.abc import Iterable

_LONGEST_SHOWN = 200


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
