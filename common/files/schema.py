"""Checks that a JSON value of unknown origin has the expected shape.

A shape is a function of a value and a description of its place; the functions below are or return shapes:

    check = list_of(number(minimum=0), maximum=3)
    check([0.5, 1], "progress.losses")

It raises `Mismatch` for the first value that is not as expected. `records` reads objects.
"""

from __future__ import annotations

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


def whole(minimum: int = 0, maximum: int = LARGEST_WHOLE) -> Shape:
    """Return a shape for integers in a range, without True and False."""

    def check(value: Any, where: str) -> None:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not minimum <= value <= maximum:
            raise Mismatch(
                f"expected {where} to be a whole number from {minimum} to {maximum}, received {brief(value)}"
            )

    return check


def number(minimum: float = -LARGEST, maximum: float = LARGEST) -> Shape:
    """Return a shape for integers and floats in a range, without nan."""

    def check(value: Any, where: str) -> None:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not minimum <= value <= maximum:
            raise Mismatch(f"expected {where} to be a number from {minimum:g} to {maximum:g}, received {brief(value)}")

    return check


def anything(value: Any, where: str) -> None:
    """Accept any value."""


def text(value: Any, where: str) -> None:
    """Accept a string."""
    if not isinstance(value, str):
        raise Mismatch(f"expected {where} to be a text, received {brief(value)}")


def matching(pattern: str, form: str) -> Shape:
    """Return a shape for strings that fully match a regular expression; `form` describes them."""

    def check(value: Any, where: str) -> None:
        if not (isinstance(value, str) and re.fullmatch(pattern, value)):
            raise Mismatch(f"expected {where} to be {form}, received {brief(value)}")

    return check


def flag(value: Any, where: str) -> None:
    """Accept True or False."""
    if not isinstance(value, bool):
        raise Mismatch(f"expected {where} to be true or false, received {brief(value)}")


def mapping(value: Any, where: str) -> None:
    """Accept any object."""
    if not isinstance(value, dict):
        raise Mismatch(f"expected {where} to be an object, received {brief(value)}")


def one_of(*values: Any) -> Shape:
    """Return a shape for one of `values`, of exactly the same type."""

    def check(value: Any, where: str) -> None:
        if not any(type(value) is type(known) and value == known for known in values):
            known = repr(values[0]) if len(values) == 1 else f"one of {', '.join(map(repr, values))}"
            raise Mismatch(f"expected {where} to be {known}, received {brief(value)}")

    return check


def list_of(shape: Shape, *, minimum: int = 0, maximum: int = 10**6) -> Shape:
    """Return a shape for lists of `minimum` to `maximum` values of `shape`."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, list):
            raise Mismatch(f"expected {where} to be a list, received {brief(value)}")
        if not minimum <= len(value) <= maximum:
            raise Mismatch(f"expected {where} to have {minimum} to {maximum} entries, received {len(value)}")
        for index, item in enumerate(value):
            shape(item, f"{where}[{index}]")

    return check
