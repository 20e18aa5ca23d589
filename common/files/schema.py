"""Checks that a JSON value of unknown origin has the expected shape.

A shape is a function of a value and a description of its place; the functions below are or return shapes:

    check = list_of(number(minimum=0), maximum=3)
    check([0.5, 1], "progress.losses")

It raises `Mismatch` for the first value that is not as expected. `records` reads objects.
"""

import re
import reprlib
from collections.abc import Callable
from typing import Any

Shape = Callable[[Any, str], None]

LARGEST_WHOLE = 2**63 - 1
LARGEST = 1e30  # far above any measured, plotted or printed value

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


class Mismatch(ValueError):
    """Error for a value of the wrong shape; the message tells what was expected where, and what was received."""


def brief(value: object) -> str:
    """Return a value in one line of at most a few hundred printable characters."""
    return _short.repr(value)


def expecting(form: str, is_right: Callable[[Any], bool]) -> Shape:
    """Return a shape for values that are right; `form` describes them."""

    def check(value: Any, where: str) -> None:
        if not is_right(value):
            raise Mismatch(f"expected {where} to be {form}, received {brief(value)}")

    return check


def whole(minimum: int = 0, maximum: int = LARGEST_WHOLE) -> Shape:
    """Return a shape for integers in a range, without True and False."""
    return expecting(f"a whole number from {minimum} to {maximum}", _is_within(int, minimum, maximum))


def number(minimum: float = -LARGEST, maximum: float = LARGEST) -> Shape:
    """Return a shape for integers and floats in a range, without nan."""
    return expecting(f"a number from {minimum:g} to {maximum:g}", _is_within((int, float), minimum, maximum))


def _is_within(kind: Any, minimum: float, maximum: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind) and not isinstance(value, bool) and minimum <= value <= maximum


def anything(value: Any, where: str) -> None:
    """Accept any value."""


def matching(pattern: str, form: str) -> Shape:
    """Return a shape for strings that fully match a regular expression; `form` describes them."""
    return expecting(form, lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None)


text = expecting("a text", lambda value: isinstance(value, str))
flag = expecting("true or false", lambda value: isinstance(value, bool))
mapping = expecting("an object", lambda value: isinstance(value, dict))


def one_of(*values: Any) -> Shape:
    """Return a shape for one of `values`, of exactly the same type."""
    form = repr(values[0]) if len(values) == 1 else f"one of {', '.join(map(repr, values))}"
    return expecting(form, lambda value: any(type(value) is type(known) and value == known for known in values))


_a_list = expecting("a list", lambda value: isinstance(value, list))


def list_of(shape: Shape, *, minimum: int = 0, maximum: int = 10**6) -> Shape:
    """Return a shape for lists of `minimum` to `maximum` values of `shape`."""

    def check(value: Any, where: str) -> None:
        _a_list(value, where)
        if not minimum <= len(value) <= maximum:
            raise Mismatch(f"expected {where} to have {minimum} to {maximum} entries, received {len(value)}")
        for index, item in enumerate(value):
            shape(item, f"{where}[{index}]")

    return check
