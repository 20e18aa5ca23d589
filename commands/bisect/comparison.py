"""Where two traces part: the first step, the first tensor and the first rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.data.slices import local_slices
from allstep.common.exact.trace import Header, Trace

_WORDS = {
    "inputs": "the inputs",
    "targets": "the targets",
    "learning_rate": "the learning rate",
    "weights_before": "the weight {} before the step",
    "activations": "the gradient at the output of {}",
    "local_gradients": "the local gradient of {}",
    "reduced_gradients": "the reduced gradient of {}",
    "weights_after": "the weight {} after the step",
}


@dataclass(frozen=True)
class Difference:
    """The first digest that is another one."""

    step: int
    tensor: str
    """In words."""
    ranks: tuple[int, int]
    """Of the first run and of the second."""
    part: int | None
    """Number of the slice, of what each slice has by itself."""

    def __str__(self) -> str:
        first, second = self.ranks
        rank = f"rank {first}" if first == second else f"ranks {first} and {second}"
        return f"step {self.step}, {rank}, {self.tensor}" + ("" if self.part is None else f" in slice {self.part}")


def check_comparable(first: Header, second: Header) -> None:
    """Refuse traces of which no digests could be equal.

    Raises:
        UserError: says why.
    """
    same = "two runs of one framework and one network, on as many ranks or with the same --slices"
    for name, one, other in (
        ("framework", first.framework, second.framework),
        ("network", f"{len(first.parameters)} weights", f"{len(second.parameters)} weights"),
        ("network", first.parameters, second.parameters),
        ("network", first.activations, second.activations),
        ("--slices", first.slices, second.slices),
    ):
        if one != other:
            received = f"{one} and {other}" if isinstance(one, (str, int)) else "weights or layers of other names"
            raise UserError(f"expected {same}, received another {name}: {received}; name two runs that should be equal")
    if first.slices is None and first.world_size != second.world_size:
        raise UserError(
            f"expected {same}, received {first.world_size} and {second.world_size} ranks; train with --slices"
        )


def common_steps(first: Trace, second: Trace) -> np.ndarray:
    """The steps that every rank of both runs has.

    Raises:
        UserError: there are none.
    """
    present = [rows["step"] for rows in (*first.rows, *second.rows)]
    steps = present[0]
    for others in present[1:]:
        steps = np.intersect1d(steps, others)
    if not steps.size:
        ends = [
            f"{rows[0]['step']} to {rows[-1]['step']}" if len(rows) else "none" for rows in _of_rank_0(first, second)
        ]
        raise UserError(f"expected steps that both runs have, received {ends[0]} and {ends[1]}; trace them alike")
    return steps


def _of_rank_0(*traces: Trace) -> list[np.ndarray]:
    return [trace.rows[0] for trace in traces]


def first_difference(first: Trace, second: Trace) -> Difference | None:
    """Where they part, among the steps that both have; None where they are equal there."""
    steps, row_type = common_steps(first, second), first.first.row_type
    columns = row_type.itemsize // 8
    found: list[tuple[int, int, tuple[int, int]]] = []
    for ranks in rank_pairs(first.first, second.first):
        one, other = (
            np.ascontiguousarray(trace.rows[rank][np.isin(trace.rows[rank]["step"], steps)])
            .view(np.int64)
            .reshape(-1, columns)
            for trace, rank in zip((first, second), ranks, strict=True)
        )
        # 0 was not recorded: weights before all but the first step, and the slices of other ranks.
        differs = (one != other) & (one != 0) & (other != 0)
        if differs.any():
            step = int(np.argmax(differs.any(axis=1)))
            found += [(step, int(column), ranks) for column in np.flatnonzero(differs[step])]
    if not found:
        return None
    row = np.arange(columns).view(row_type)[0]

    def order(one: tuple[int, int, tuple[int, int]]) -> tuple:
        step, column, ranks = one
        number, _, placement = _place(row, column)
        return step, number, placement[-1], ranks, placement

    step, column, ranks = min(found, key=order)
    _, name, placement = _place(row, column)
    names = {"activations": first.first.activations}.get(name, first.first.parameters)
    by_part = name in ("inputs", "targets", "activations", "local_gradients")
    part = int(placement[0]) if by_part and first.first.slices else None
    return Difference(
        int(steps[step]), _WORDS[name].format(names[placement[-1]] if "{" in _WORDS[name] else ""), ranks, part
    )


def _place(row: np.void, column: int) -> tuple[int, str, tuple[int, ...]]:
    """Number and name of the field in which a column is, and its place there."""
    for number, name in enumerate(row.dtype.names or ()):
        if (indices := np.argwhere(np.atleast_1d(row[name]) == column)).size:
            return number, name, tuple(map(int, indices[0]))
    raise AssertionError("each column is in a field")


def rank_pairs(first: Header, second: Header) -> list[tuple[int, int]]:
    """The ranks whose digests can be compared."""
    if first.world_size == second.world_size:
        return [(rank, rank) for rank in range(first.world_size)]
    sizes = first.world_size, second.world_size
    pairs = {(rank, 0) for rank in range(sizes[0])} | {(0, rank) for rank in range(sizes[1])}
    for number in range(first.slices or 0):
        one, other = (
            next(rank for rank in range(size) if number in local_slices(rank, size, first.slices or 0))
            for size in sizes
        )
        pairs.add((one, other))
    return sorted(pairs)


def settings_apart(first: Header, second: Header) -> Iterator[tuple[str, object, object]]:
    """Name and both values of what is not the same in how and where the runs were."""
    for item in fields(Header):
        one, other = getattr(first, item.name), getattr(second, item.name)
        if isinstance(one, dict):
            for name in sorted(one.keys() | other.keys()):
                if one.get(name) != other.get(name) and name != "output-dir":
                    yield name, one.get(name), other.get(name)
        elif one != other and item.name not in ("activations", "parameters"):
            yield item.name.replace("_", " "), one, other
