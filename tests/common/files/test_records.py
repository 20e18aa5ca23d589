"""Dataclasses as JSON and back. Oracle: the types of their fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import pytest

from allstep.common.files.strict_json import Count, Mismatch, Positive, from_json, list_of, number, to_json, whole


@dataclass(frozen=True)
class Inner:
    seconds: Positive
    temperature: Annotated[int, whole(-300)] = 20


@dataclass(frozen=True)
class Outer:
    DERIVED: ClassVar[tuple[str, ...]] = ("twice",)

    count: Count
    rate: float
    name: str
    right: bool
    status: Literal["ok", "failed"]
    note: str | None
    inner: Inner
    inners: tuple[Inner, ...]
    pair: tuple[str, float]
    by_name: dict[str, tuple[int, ...]]
    least_one: Annotated[tuple[float, ...], list_of(number(), minimum=1)]
    free: Any
    later: Inner | None = None

    @property
    def twice(self) -> int:
        return 2 * self.count


VALUE = {
    "count": 2, "rate": 1, "name": "a", "right": True, "status": "ok", "note": None, "inner": {"seconds": 0.5},
    "inners": [{"seconds": 1, "temperature": -5, "more": 1}], "pair": ["b", 2], "by_name": {"c d": [1, 2]},
    "least_one": [0.5], "free": {"e": [1]},
}  # fmt: skip
RECORD = Outer(
    2, 1.0, "a", True, "ok", None, Inner(0.5), (Inner(1.0, -5),), ("b", 2.0), {"c d": (1, 2)}, (0.5,), {"e": [1]}
)


def test_a_record_is_read_and_written():
    record = from_json(Outer, VALUE, "it")
    assert record == RECORD
    assert isinstance(record.rate, float) and isinstance(record.inners[0].seconds, float)
    assert to_json(record)["twice"] == 4
    assert from_json(Outer, to_json(record), "it") == record


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"count": 0}, "it.count to be a whole number from 1 .* received 0"),
        ({"count": True}, "it.count .* received True"),
        ({"rate": "1"}, "it.rate to be a number .* received '1'"),
        ({"rate": 10**400}, "it.rate to be a number"),
        ({"right": 1}, "it.right to be true or false, received 1"),
        ({"status": "no"}, "it.status to be one of 'ok', 'failed', received 'no'"),
        ({"note": 1}, "it.note to be a text, received 1"),
        ({"inner": None}, "it.inner to be an object, received None"),
        ({"inner": {}}, r"it.inner to have seconds, received \[\] alone"),
        ({"inners": [{"seconds": 1}, {"seconds": 0}]}, r"it.inners\[1\].seconds to be a number from 1e-30"),
        ({"pair": ["b"]}, "it.pair to have 2 to 2 entries, received 1"),
        ({"pair": [2, "b"]}, r"it.pair\[0\] to be a text"),
        ({"by_name": {"c d": [1, None]}}, r"it.by_name.'c d'\[1\] to be a whole number"),
        ({"by_name": []}, r"it.by_name to be an object, received \[\]"),
        ({"least_one": []}, "it.least_one to have 1 to"),
        ({"later": []}, r"it.later to be an object, received \[\]"),
    ],
    ids=str,
)
def test_what_is_not_as_the_types_say_is_named(changes, expected):
    with pytest.raises(Mismatch, match=f"expected {expected}"):
        from_json(Outer, {**VALUE, **changes}, "it")


@pytest.mark.parametrize("name", VALUE)
def test_what_lacks_is_named(name):
    with pytest.raises(Mismatch, match=f"expected it to have {name}, received"):
        from_json(Outer, {key: value for key, value in VALUE.items() if key != name}, "it")
