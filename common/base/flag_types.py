"""Flag types: functions that parse a flag's word into a value, or report in one line what was expected.

The flags of the trainers (`train_config.py`) and of the commands of `allstep` share these types and their error
messages. A type that rejects a word raises ArgumentTypeError with the end of a sentence, such as `to be at least 1,
received 0; raise it`; the caller, which knows the flag's name or the file and line, puts that in front.
"""

import argparse
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from allstep.common.base.checkout import with_trainers_here
from allstep.common.base.compat import flag_names, take_for_values
from allstep.common.base.errors import UserError, did_you_mean, quote

Value = TypeVar("Value")
Kind = Callable[[str], Value]
"""Flag type: parses a word into a value."""

_SMALLEST = 1e-30
"""Smallest positive number: a smaller one is a mistake, and dividing by it soon gives infinity."""
_NUMBER = re.compile(
    r"[+-]?(([0-9]{1,1000}\.?[0-9]{0,1000}|\.[0-9]{1,1000})([eE][+-]?[0-9]{1,9})?|inf(inity)?)", re.ASCII
)
"""Numbers as the shell, JSON and C write them: without the `_`, blanks and non-ASCII digits that Python allows."""
MAX_COUNT = 10**9
"""Limit of plain counts, large enough to mean "never" or "all"."""
MAX_ROUNDS = 1000
"""Limit of the rounds of a measurement: more rounds only show how the machine changes."""
WEEK = 7 * 24 * 3600
"""Seconds in a week, the longest timeout that a flag may set."""


def wrong(expected: str, received: str, advice: str) -> argparse.ArgumentTypeError:
    """Return the error of a type: the end of a sentence that begins with `expected --flag`."""
    return argparse.ArgumentTypeError(f"{expected}, received {quote(received)}; {advice}")


def whole(minimum: int, maximum: int, because: str = "") -> Kind[int]:
    """Return a type for whole numbers from `minimum` to `maximum`; `because` explains the upper bound in errors."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,1000}", text):
            raise wrong("to be a whole number", text, "write it in digits, as in 32")
        _expect_within(int(text), text, minimum, maximum, because)
        return int(text)

    return parse


def number(
    minimum: float, maximum: float, *, above: bool = False, below: bool = False, smallest: float = _SMALLEST
) -> Kind[float]:
    """Return a type for numbers from `minimum` to `maximum`; `above` excludes `minimum`, `below` excludes `maximum`.

    The absolute value must be 0 or at least `smallest`.
    """

    def parse(text: str) -> float:
        if not _NUMBER.fullmatch(text):
            raise wrong("to be a number", text, "write it as in 0.01 or 1e-2")
        value = float(text)
        if 0 < abs(value) < smallest:
            raise wrong(f"to be 0 or at least {smallest:g}", text, "raise it")
        _expect_within(value, text, minimum, maximum, above=above, below=below)
        return value

    return parse


def _expect_within(
    value: float,
    text: str,
    minimum: float,
    maximum: float,
    because: str = "",
    *,
    above: bool = False,
    below: bool = False,
) -> None:
    if value < minimum or (above and value == minimum):
        raise wrong(f"to be {'above' if above else 'at least'} {_plain(minimum)}", text, "raise it")
    if value > maximum or (below and value == maximum):
        reason = f", {because}" if because else ""
        raise wrong(f"to be {'below' if below else 'at most'} {_plain(maximum)}{reason}", text, "lower it")


def _plain(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def local_ranks(minimum: int = 1) -> Kind[int]:
    """Return a type for the number of ranks, or of devices made of cores, on this machine."""
    return whole(minimum, max_local_ranks(), f"as they share the {_num_cores()} cores of this machine")


def max_local_ranks() -> int:
    """Return the number of cores, or 16 if that is larger, for GPUs and for tests of many ranks on a small machine."""
    return max(16, _num_cores())


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def one_of(*names: str) -> Kind[str]:
    """Return a type for one of the names."""

    def parse(text: str) -> str:
        if text not in names:
            raise wrong(f"to be one of {', '.join(names)}", text, did_you_mean(text, names, "name one"))
        return text

    return parse


def listed(kind: Kind[Value]) -> Kind[tuple[Value, ...]]:
    """Return a type for one or more values separated by commas, without duplicates."""
    return lambda text: tuple(dict.fromkeys(kind(word) for word in text.split(",")))


def nonempty_text(word: str) -> str:
    """Parse text that is not blank."""
    if not word.strip() or "\0" in word:
        raise wrong("to be a text", word, "name something, or leave the flag out")
    return word


def nonempty_path(word: str) -> Path:
    """Parse a path; callers check whether it exists and may be read or written."""
    if not word.strip() or "\0" in word:
        raise wrong("to be a path", word, "name one, or leave the flag out")
    return Path(word)


def ramp_step(word: str) -> str:
    """Parse EPOCH:FACTOR, the whole number that multiplies the batch from that epoch on, or auto."""
    epoch, colon, factor = word.partition(":")
    if word == "auto":
        return word
    try:
        if not colon:
            raise wrong("", word, "")
        number(0, MAX_COUNT)(epoch)
        whole(1, MAX_COUNT)(factor)
    except argparse.ArgumentTypeError:
        raise wrong("to be EPOCH:FACTOR or auto", word, "write it as in 5:2") from None
    return word


def step_range(word: str) -> str:
    """Parse FIRST:LAST, steps that count from 1."""
    steps = re.fullmatch(r"([0-9]{1,20}):([0-9]{1,20})", word)
    if not (steps and 1 <= int(steps[1]) <= int(steps[2]) <= MAX_COUNT):
        raise wrong("to be FIRST:LAST, steps from 1 on", word, "write it as in 10:15")
    return word


def flag_name(word: str) -> str | None:
    """Return the name of a flag, as batch-size of --batch_size=8 and ema of --no-ema; None for other words."""
    name = word.partition("=")[0].replace("_", "-")
    return name[2:].removeprefix("no-") if name.startswith("--") else None


def flag_value(words: Sequence[str], name: str) -> str | None:
    """Return the first value of the last flag of that name, which overrides earlier ones; None if it is not given."""
    for index in reversed(range(len(words))):
        if flag_name(words[index]) == name:
            _, equals, value = words[index].partition("=")
            return value if equals else next(iter(words[index + 1 :]), None)
    return None


class Parser(argparse.ArgumentParser):
    """Argument parser that raises UserError with messages like those of the rest of allstep."""

    def __init__(self, prog: str | None, description: str | None, **options: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        description = description and with_trainers_here(description)
        super().__init__(prog, description=description, formatter_class=formatter, allow_abbrev=False, **options)
        # Without this, argparse accepts -1 and -0.5 as values, but takes -1e-3, -inf and -nan for flags.
        take_for_values(self, r"-(\d|\.\d|inf|nan)")

    def parse_args(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse arguments like argparse, but suggest the nearest flag for an unknown word."""
        flags, rest = self.parse_known_args(arguments)
        if rest:
            self.refuse(rest[0], flag_names(self))
        return flags

    def refuse(self, word: str, names: Iterable[str]) -> NoReturn:
        """Raise a UserError for a word that belongs to none of the flags `names`."""
        name = word.partition("=")[0]
        if not name.startswith("-"):
            self.error(f"expected flags and their values, received {quote(word)} after them; leave it out")
        advice = did_you_mean(name, names)
        self.error(f"expected a flag of {self.prog}, received {quote(name)}{advice and f'; {advice}'}")

    def error(self, message: str) -> NoReturn:
        """Raise a UserError with argparse's message in the wording of other errors of allstep."""
        for pattern, form in _ARGPARSE:
            if match := re.fullmatch(pattern, message, re.DOTALL):
                message = form.format(*map(str, match.groups()))
        raise UserError(f"{message} ({self.prog} --help lists all flags)")


_NAMED = r"argument (.+?)(?:/.+?)?: "
# Messages of argparse, and what to print instead.
_ARGPARSE = (
    (rf"{_NAMED}(to be .+)", "expected {} {}"),
    (rf"{_NAMED}expected (?:one|1) argument", "expected a value after {}, received none; give one"),
    (rf"{_NAMED}expected at least one argument", "expected values after {}, received none; give one or more"),
    (rf"{_NAMED}expected (\d+) arguments", "expected {1} values after {0}, received fewer; give all"),
    (rf"{_NAMED}ignored explicit argument '(.*)'", "expected {} alone, received it with the value {}; leave that out"),
    (rf"{_NAMED}invalid choice: '(.*)' \(choose from (.*)\)", "expected {0} to be one of {2}, received {1}; name one"),
    (r"the following arguments are required: (.+)", "expected {}, received nothing for it; give it"),
)
