"""The two ways a run ends early: the user's mistake (exit status 2) and a fault (exit status 1)."""

_LONGEST_SHOWN = 200


class UserError(Exception):
    """The input was wrong. The message is one line: what was expected, what was received, what to do."""

    def __str__(self) -> str:
        return printable(super().__str__())


class Fault(Exception):
    """The run cannot go on although the input was right. The message names the rank, the step and the cause."""


class RanksLost(Fault):
    """Other ranks are gone: the end of a job, unless it is elastic."""


def printable(text: str) -> str:
    """A text that may quote names with line breaks, or with codes that a terminal obeys: in one line, without any."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def summary(error: BaseException) -> str:
    """An exception in one line: its type and the last line of its message, where TensorFlow puts the cause."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1].strip()}" if lines else type(error).__name__


def shown(given: object) -> str:
    """What a user gave, fit for a line: cut where it is long, quoted where it is empty or a terminal would obey it."""
    text = str(given)
    cut = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}... ({len(text)} characters)"
    return cut if text.strip() and cut.isprintable() else ascii(cut)
