"""Find the first step, tensor and rank at which two runs diverge that should be equal.

    python pytorch/train.py --trace --deterministic --output-dir runs/a
    allstep bisect runs/a runs/b

Both arguments are output directories of runs with --trace. The step at which they diverge is trained again for both
runs, from the nearest checkpoint before it. A run whose replay reproduces its own digests computes as configured; one
whose replay does not has a hardware fault, a race, or sums in no fixed order. The exit status is 0 if the runs are
equal, 1 if they diverge, 2 if they cannot be compared.

A run directory is data: FILE.py:FUNCTION in the flags of a run is imported for its replay only if you name it here too,
by the same flag.
"""

import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from allstep.commands.bisect.replay import replay
from allstep.common.base.errors import UserError, printable
from allstep.common.base.flag_types import Parser, nonempty_path
from allstep.common.catalog import user_file
from allstep.common.data.slices import local_slices
from allstep.common.exact.trace import Header, Trace, read

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
    """The first digest in which two traces differ."""

    step: int
    tensor: str
    """Description of the tensor in words."""
    ranks: tuple[int, int]
    """Rank in the first run and rank in the second."""
    part: int | None
    """Number of the slice, for digests of single slices; None for others."""

    def __str__(self) -> str:
        first, second = self.ranks
        rank = f"rank {first}" if first == second else f"ranks {first} and {second}"
        return f"step {self.step}, {rank}, {self.tensor}" + ("" if self.part is None else f" in slice {self.part}")


def check_comparable(first: Header, second: Header) -> None:
    """Refuse two traces whose digests could never be equal.

    They differ in framework, network or --slices or, without --slices, in world size.
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
    """Return the steps that every rank of both runs has recorded. Raises UserError if no step is common to all."""
    present = [rows["step"] for rows in (*first.rows, *second.rows)]
    steps = functools.reduce(np.intersect1d, present)
    if not steps.size:
        ranks = (trace.rows[0] for trace in (first, second))
        ends = [f"{rows[0]['step']} to {rows[-1]['step']}" if len(rows) else "none" for rows in ranks]
        raise UserError(f"expected steps that both runs have, received {ends[0]} and {ends[1]}; trace them alike")
    return steps


def first_difference(first: Trace, second: Trace) -> Difference | None:
    """Return where two traces diverge among their common steps, or None if they are equal there."""
    steps, row_type = common_steps(first, second), first.first.row_type
    columns = row_type.itemsize // 8
    row = np.arange(columns).view(row_type)[0]
    found = []
    for ranks in rank_pairs(first.first, second.first):
        one, other = (
            np.ascontiguousarray(trace.rows[rank][np.isin(trace.rows[rank]["step"], steps)])
            .view(np.int64)
            .reshape(-1, columns)
            for trace, rank in zip((first, second), ranks, strict=True)
        )
        # A digest of 0 was not recorded, e.g. of the weights before a later step or of the slices of other ranks.
        differs = (one != other) & (one != 0) & (other != 0)
        if differs.any():
            step = int(np.argmax(differs.any(axis=1)))
            for column in np.flatnonzero(differs[step]):
                number, name, indices = _field_of(row, int(column))
                found.append((step, number, name, indices[-1], ranks, indices))
    if not found:
        return None
    step, _, name, tensor, ranks, indices = min(found)
    names = {"activations": first.first.activations}.get(name, first.first.parameters)
    by_part = name in ("inputs", "targets", "activations", "local_gradients")
    part = int(indices[0]) if by_part and first.first.slices else None
    words = _WORDS[name].format(names[tensor]) if "{" in _WORDS[name] else _WORDS[name]
    return Difference(int(steps[step]), words, ranks, part)


def _field_of(row: np.void, column: int) -> tuple[int, str, tuple[int, ...]]:
    """Return number and name of the field that contains a column, and the column's indices in that field."""
    for number, name in enumerate(row.dtype.names or ()):
        if (indices := np.argwhere(np.atleast_1d(row[name]) == column)).size:
            return number, name, tuple(map(int, indices[0]))
    raise AssertionError("each column is in a field")


def rank_pairs(first: Header, second: Header) -> list[tuple[int, int]]:
    """Return the pairs of ranks, one of each run, whose digests can be compared."""
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
    """Yield name and both values of each setting or circumstance in which two runs differ."""
    for item in fields(Header):
        one, other = getattr(first, item.name), getattr(second, item.name)
        if isinstance(one, dict):
            for name in sorted(one.keys() | other.keys()):
                if one.get(name) != other.get(name) and name != "output-dir":
                    yield name, one.get(name), other.get(name)
        elif one != other and item.name not in ("activations", "parameters"):
            yield item.name.replace("_", " "), one, other


def main(argv: Sequence[str] | None = None) -> None:
    """Compare, replay and print; exit with status 1 if the runs diverge."""
    parser = Parser("allstep bisect", __doc__)
    parser.add_argument("first", type=nonempty_path, metavar="RUN", help="the output directory of a run")
    parser.add_argument("second", type=nonempty_path, metavar="RUN", help="the output directory of the other run")
    parser.add_argument("--no-replay", action="store_true", help="only compare what was recorded")
    for name in user_file.FLAGS:
        meta = "FILE.py:FUNCTION"
        parser.add_argument(f"--{name}", action="append", default=[], metavar=meta, help=f"code of a run's --{name}")
    flags = parser.parse_args(argv)
    code = [word for name in user_file.FLAGS for word in getattr(flags, name)]
    first, second = read(flags.first), read(flags.second)
    check_comparable(first.first, second.first)
    steps, difference = common_steps(first, second), first_difference(first, second)
    if difference is None:
        print(f"equal for steps {steps[0]} to {steps[-1]}")
        return
    print(printable(f"the runs part at {difference}"))
    if difference.step == steps[0] and difference.step > 1:
        print("  it is the first step of which both have a record: they may have parted before")
    for name, one, other in settings_apart(first.first, second.first):
        print(printable(f"  {name}: {one}, {other}"))
    if not flags.no_replay:
        for path, trace in ((flags.first, first), (flags.second, second)):
            print(printable(f"{path}: {_verdict(path, trace, difference.step, code)}"), flush=True)
    sys.exit(1)


def _verdict(path: Path, recorded: Trace, step: int, code: Sequence[str]) -> str:
    """Replay a run and return in words whether it reproduces its own digests."""
    try:
        difference = first_difference(recorded, replay(path, recorded.first, step, code))
    except UserError as error:
        return f"not replayed: {error}"
    if difference is None:
        return f"step {step} gives its own digests again: what makes it differ is its configuration, code or versions"
    fixed = recorded.first.config.get("deterministic") or recorded.first.slices
    unless = "" if fixed else ", or sums in no fixed order: it had neither --slices nor --deterministic"
    return f"does not give its own digests again, first at {difference}: a fault of hardware or a race there{unless}"
