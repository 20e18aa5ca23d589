"""Records of one rank, and what follows from them about the rank alone, such as where it validates its model.

Validation is a loop without steps over a loader of its own. Passes of a teacher, of pseudo-labels, or over training
samples are not. Without loaders it is a few calls between some of the steps, on samples that are not trained on.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from allstep.commands.prove.records import (
    BACKWARD,
    HOROVOD_JOIN,
    JOIN,
    Batch,
    Collective,
    Ended,
    Forward,
    Loop,
    Record,
    Resumed,
    Started,
    Step,
    Waiting,
    World,
    Yielded,
)

Kind = TypeVar("Kind", bound=Record)
MOST = 0.5
"""Share of samples in common above which batches count as the same."""


@dataclass(frozen=True)
class Rank:
    """Records of one rank."""

    records: tuple[Record, ...]

    def all(self, kind: type[Kind]) -> list[Kind]:
        """Return the records of a kind, in order."""
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def number(self) -> int:
        """Number of the rank according to the library that it has initialised, else according to its launcher."""
        worlds, started = self.all(World), self.all(Started)
        return worlds[-1].rank if worlds else started[0].rank

    @property
    def library(self) -> str:
        """Library that the rank has initialised last; empty without any."""
        worlds = self.all(World)
        return worlds[-1].library if worlds else ""

    @property
    def pid(self) -> int:
        return self.all(Started)[0].pid

    @property
    def ended(self) -> Ended | None:
        """Record of the end of the rank, if it has ended by itself."""
        return next(iter(self.all(Ended)), None)

    @property
    def error(self) -> str | None:
        """Error that has ended the rank, in one line."""
        return self.ended.reason if self.ended and self.ended.reason not in ("steps", "script") else None

    @property
    def wait(self) -> Waiting | None:
        """Record of what the rank waits for, if it waits."""
        return self.records[-1] if isinstance(self.records[-1], Waiting) else None

    @property
    def waits(self) -> list[Waiting]:
        """Records of what the threads of the rank wait for at the end, the main thread first."""
        open_waits: dict[int, Waiting] = {}
        for record in self.records:
            if isinstance(record, Waiting):
                open_waits[record.thread] = record
            elif isinstance(record, Resumed):
                open_waits.pop(record.thread, None)
        return sorted(open_waits.values(), key=lambda wait: wait.thread)

    @property
    def position(self) -> tuple[object, ...]:
        """Progress of the rank through its collectives; differs between ranks that are in a deadlock."""
        collectives = self.all(Collective)
        last = collectives[-1] if collectives else None
        return (len(collectives), last and (last.kind, last.name, last.shape), self.wait)

    def steps(self, optimizer: int = 1) -> list[Step]:
        """Return the steps of one of the rank's optimizers."""
        return [step for step in self.all(Step) if step.optimizer == optimizer]

    def rounds(self, optimizer: int = 1) -> list[list[Step]]:
        """Return the steps of one of the rank's optimizers, apart where it has joined others."""
        found: list[list[Step]] = [[]]
        for record in self.records:
            if is_join(record):
                found.append([])
            elif isinstance(record, Step) and record.optimizer == optimizer:
                found[-1].append(record)
        return found

    @cached_property
    def optimizers(self) -> dict[tuple[str, str, int], int]:
        """Numbers of the rank's optimizers by class, line of the first step, and order among those with the same."""
        found: dict[tuple[str, str, int], int] = {}
        for step in self.all(Step):
            if step.number == 1:
                order = sum(key[:2] == (step.kind, step.line) for key in found)
                found[step.kind, step.line, order] = step.optimizer
        return found

    def with_optimizers(self, kept: Sequence[tuple[str, str, int]]) -> Rank:
        """Return the rank without steps of other optimizers than these, which get their numbers by this order."""
        numbers = {self.optimizers.get(key): number for number, key in enumerate(kept, 1)}
        counts: Counter[int] = Counter()
        records: list[Record] = []
        for record in self.records:
            if isinstance(record, Step):
                if record.optimizer not in numbers:
                    continue
                record = replace(record, optimizer=numbers[record.optimizer])
                counts[record.optimizer] += 1
            elif isinstance(record, Forward):
                record = replace(record, step=max(counts.values(), default=0) + 1)
            records.append(record)
        return Rank(tuple(records))

    @property
    def training_loops(self) -> list[Loop]:
        """Loops during which the rank has stepped, in order, after single steps by which a script builds its model."""
        trained = {step.loop for step in self.steps()}
        loops = [loop for loop in self.all(Loop) if loop.number in trained]
        return [*itertools.dropwhile(lambda loop: loop.num_batches == 1, loops)] or loops

    def indices(self, loop: Loop) -> list[int]:
        """Return the indices of the samples that a loop's loader has drawn."""
        return [index for batch in self.all(Batch) if batch.loop == loop.number for index in batch.indices]

    def rows(self, loop: Loop) -> list[str]:
        """Return digests of the samples that the rank has trained on in a loop."""
        return [row for one in self.forwards(training=True) if one.loop == loop.number for row in one.rows]

    @cached_property
    def loaded(self) -> set[str]:
        """Digests of the samples that loaders have yielded."""
        return {row for batch in self.all(Yielded) for row in batch.rows}

    def forwards(self, *, training: bool) -> list[Forward]:
        """Return the calls of the rank's models, in training or in validation; teachers' are in neither."""
        found = self.training_calls if training else self.validation_calls
        return [self.records[index] for index in found]  # pyright: ignore[reportReturnType]

    @cached_property
    def validation_calls(self) -> list[int]:
        """Positions of the records of calls that validate a model."""
        return sorted(validations(self.records))

    @cached_property
    def training_calls(self) -> list[int]:
        """Positions of the records of calls that train a model."""
        others = {*self.validation_calls}
        calls = ((index, record) for index, record in enumerate(self.records) if index not in others)
        return [index for index, record in calls if isinstance(record, Forward) and record.is_training]


def is_join(record: Record) -> bool:
    """Return whether a rank without more batches called a join, in which it waits for the others."""
    return getattr(record, "kind", getattr(record, "what", "")) in (JOIN, HOROVOD_JOIN)


def validations(records: Sequence[Record]) -> set[int]:
    """Return the positions of the records of calls that validate a model."""
    calls = {index: record for index, record in enumerate(records) if isinstance(record, Forward)}
    found = {index for index, call in calls.items() if call.evaluates}
    candidates = {index: call for index, call in calls.items() if call.evaluates is None and call.in_eval}
    foreign = _loops_of_other_data(records)
    in_loops = {index for index, call in candidates.items() if call.loop in foreign}
    steps = [record for record in records if isinstance(record, Step)]
    gaps = {index: call.step for index, call in candidates.items() if not call.loop and not call.is_training}
    outside = {index for index, step in gaps.items() if step > 1 and 2 * len({*gaps.values()}) <= len(steps)}
    found |= in_loops | outside
    trained = {row for index, call in calls.items() if call.is_training and index not in found for row in call.rows}
    return {index for index in found if calls[index].evaluates or not _is_among(calls[index].rows, trained)}


def _is_among(rows: Sequence[str], trained: set[str]) -> bool:
    return bool(rows) and len({*rows} & trained) > MOST * len({*rows})


def _loops_of_other_data(records: Sequence[Record]) -> set[int]:
    """Return the numbers of the loops in which models are called but not trained, over data that are not trained on."""
    spans: dict[int, list[int]] = {}
    for index, record in enumerate(records):
        if isinstance(record, Forward) and record.loop:
            spans.setdefault(record.loop, []).append(index)
    trains = {loop for loop, span in spans.items() if _has_training(records, loop, span)}
    trains |= {record.loop for record in records if isinstance(record, Step)}
    data = {record.number: record.data for record in records if isinstance(record, Loop)}
    trained_data = {data.get(loop) for loop in trains} - {0, None}
    return {loop for loop in spans if loop not in trains and data.get(loop) not in trained_data}


def _has_training(records: Sequence[Record], loop: int, span: Sequence[int]) -> bool:
    """Return whether a backward pass or a step happens between the calls of a loop, or right after them."""
    for index in range(span[0], len(records)):
        record = records[index]
        is_after = index > span[-1]
        if is_after and (isinstance(record, Loop) or (isinstance(record, Forward) and record.loop != loop)):
            return False
        if isinstance(record, Step) or (isinstance(record, Waiting) and record.what == BACKWARD):
            return True
    return False


def reductions(rank: Rank) -> Iterator[tuple[Step, list[Collective]]]:
    """Yield each step of a rank with the reductions since the last forward or backward pass."""
    since: list[Collective] = []
    for record in rank.records:
        if isinstance(record, Forward) or (isinstance(record, Waiting) and record.what == BACKWARD):
            since = []
        elif isinstance(record, Collective) and "reduce" in record.kind and record.line:
            since.append(record)
        elif isinstance(record, Step):
            yield record, since
            since = []
