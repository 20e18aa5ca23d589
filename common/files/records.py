"""Conversion of frozen dataclasses to JSON and back. The types of their fields describe the format:

    @dataclass(frozen=True)
    class Row:
        name: str
        seconds: Annotated[float, number(0)]
        note: str | None = None

    row = from_json(Row, {"name": "a", "seconds": 1.5}, "row")

A type is int, float, str, bool, a dataclass, a Literal or Any, or a tuple, a dict with string keys or a union with None
of these. `Annotated` narrows a type by a shape of `schema`. A field with a default may be missing, and unknown keys are
ignored, unless `CLOSED` is true. A record may name properties in `DERIVED`, which are written for other programs and
not read.
"""

import functools
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from allstep.common.base.errors import did_you_mean, quote
from allstep.common.files.schema import (
    Mismatch,
    Shape,
    anything,
    brief,
    flag,
    list_of,
    mapping,
    number,
    one_of,
    text,
    whole,
)

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
