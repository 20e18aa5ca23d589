"""Strict parser for untrusted JSON: only what the standard allows, no duplicate keys, and limited nesting."""

import json
import re
from typing import Any, NoReturn

MAX_DEPTH = 32
NON_FINITE = "non_finite"
"""Only key of the object that stands for a number that JSON does not have: nan, inf or -inf."""
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))


class NotJson(ValueError):
    """Error for data that is not strict JSON."""


def loads(data: bytes) -> Any:
    """Return the value in `data`, which is UTF-8. It takes at most some tens of times the memory of `data`.

    Raises NotJson if `data` is not JSON, has a duplicate key, NaN or an infinity, or is nested deeper than `MAX_DEPTH`.
    """
    if _is_deeper(data, MAX_DEPTH):
        raise NotJson(f"expected JSON nested at most {MAX_DEPTH} deep, received more, or brackets that do not pair")
    try:
        return json.loads(data.decode(), object_pairs_hook=_once, parse_constant=_no_constant)
    except NotJson:
        raise
    except ValueError as error:  # not UTF-8, not JSON, or a number with too many digits for Python
        raise NotJson(f"expected JSON, received something else: {error}") from None


def _is_deeper(data: bytes, depth: int) -> bool:
    """Return whether brackets outside strings do not match, or are nested too deeply for a recursive parser."""
    without_escapes = data.replace(rb"\\", b"").replace(rb"\"", b"")
    brackets = re.sub(rb'"[^"]*"', b"", without_escapes).translate(_BRACKETS, _OTHERS)
    for _ in range(depth):  # each pass removes the innermost pairs
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise NotJson(f"expected every key once, received {twice[:60]!r} twice")
    return content


def _no_constant(name: str) -> NoReturn:
    raise NotJson(f"expected numbers that JSON has, received {name}")
