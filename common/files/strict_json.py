"""JSON of unknown origin: a strict parser, shapes of values, and frozen dataclasses as JSON and back.

The parser takes only what the standard allows, no duplicate keys, and limited nesting.

The types of a dataclass' fields describe the format:

    @dataclass(frozen=True)
    class Row:
        name: str
        seconds: Annotated[float, number(0)]
        note: str | None = None

    row = from_json(Row, {"name": "a", "seconds": 1.5}, "row")

A type is int, float, str, bool, a dataclass, a Literal or Any, or a tuple, a dict with string keys or a union with None
of these. `Annotated` narrows a type by a shape, a function of a value and a description of its place, which raises
`Mismatch` for the first value that is not as expected. A field with a default may be missing, and unknown keys are
ignored, unless `CLOSED` is true. A record may name properties in `DERIVED`, which are written for other programs and
not read.
"""

import functools
import json
import re
import reprlib
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from allstep.common.base.errors import did_you_mean, quote

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


Record = TypeVar("Record")
Reader = Callable[[Any, str], Any]

Whole = Annotated[int, whole()]
Count = Annotated[int, whole(1)]
Positive = Annotated[float, number(1e-30)]
NonNegative = Annotated[float, number(0)]

_SCALARS: dict[Any, Shape] = {int: whole(), float: number(), str: text, bool: flag}


def from_json(kind: type[Record], value: Any, where: str) -> Record:
    """Return the record of type `kind` in a JSON value. Raises Mismatch for the first place that does not fit.

    `where` names the value in the message.
    """
    return _reader(kind)(value, where)


def to_json(value: Any) -> Any:
    """Return the JSON value of a record, or of lists, tuples and dicts of records."""
    if is_dataclass(value):
        names = (*(field.name for field in fields(value)), *getattr(value, "DERIVED", ()))
        return {name: to_json(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, (list, tuple)) else value


@functools.cache
def _reader(kind: Any) -> Reader:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value, where: value
    if kind in _SCALARS:
        return _checked(_SCALARS[kind], lambda value, where: kind(value))
    if is_dataclass(kind):
        return _record_reader(kind)
    if origin is Annotated:
        inner, shape = arguments
        return _checked(shape, (lambda value, where: inner(value)) if inner in _SCALARS else _reader(inner))
    if origin is Literal:
        return _checked(one_of(*arguments), lambda value, where: value)
    if origin in (Union, UnionType):
        [read] = (_reader(argument) for argument in arguments if argument is not NoneType)
        return lambda value, where: None if value is None else read(value, where)
    if origin is dict:
        return _checked(mapping, _dict_reader(_reader(arguments[1])))
    if origin is tuple and arguments[1:] == (...,):
        return _checked(list_of(anything), _tuple_reader(_reader(arguments[0])))
    if origin is tuple:
        length = len(arguments)
        return _checked(list_of(anything, minimum=length, maximum=length), _tuple_reader(*map(_reader, arguments)))
    raise TypeError(f"{kind} has no form in JSON")


def _checked(shape: Shape, read: Reader) -> Reader:
    def reader(value: Any, where: str) -> Any:
        shape(value, where)
        return read(value, where)

    return reader


def _dict_reader(read: Reader) -> Reader:
    return lambda value, where: {
        key: read(item, f"{where}.{key if key.isidentifier() else brief(key)}") for key, item in value.items()
    }


def _tuple_reader(*readers: Reader) -> Reader:
    """Return a reader of tuples with a reader for each item, or a single reader for all items."""

    def read(value: list, where: str) -> tuple:
        item_readers = readers * len(value) if len(readers) == 1 else readers
        pairs = enumerate(zip(item_readers, value, strict=True))
        return tuple(read_item(item, f"{where}[{index}]") for index, (read_item, item) in pairs)

    return read


def _record_reader(kind: Any) -> Reader:
    types = get_type_hints(kind, include_extras=True)
    readers = {field.name: _reader(types[field.name]) for field in fields(kind)}
    required = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    is_closed = getattr(kind, "CLOSED", False)

    def read(value: Any, where: str) -> Any:
        mapping(value, where)
        for name in required:
            if name not in value:
                raise Mismatch(f"expected {where} to have {name}, received {brief(sorted(value))} alone")
        if is_closed and (more := value.keys() - readers.keys()):
            advice = did_you_mean(min(more), readers)
            hint = f" ({advice})" if advice else ""
            raise Mismatch(f"expected {where} to have {', '.join(readers)} alone, received {quote(min(more))}{hint}")
        return kind(**{
            name: read_field(value[name], f"{where}.{name}") for name, read_field in readers.items() if name in value
        })  # fmt: skip

    return read
