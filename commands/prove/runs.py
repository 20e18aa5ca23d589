"""What was observed of a script: the records of its ranks, run alone and together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from allstep.commands.prove.records import (
    Batch,
    Collective,
    Ended,
    Forward,
    Loop,
    Record,
    Started,
    Step,
    Waiting,
    World,
    Wrapped,
    Write,
)

Kind = TypeVar("Kind", bound=Record)


@dataclass(frozen=True)
class Rank:
    """What one rank wrote down."""

    records: tuple[Record, ...]

    def all(self, kind: type[Kind]) -> list[Kind]:
        """The records of a kind, in order."""
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def number(self) -> int:
        """By the library that it has initialised, else by its launcher."""
        worlds, started = self.all(World), self.all(Started)
        return worlds[-1].rank if worlds else started[0].rank

    @property
    def library(self) -> str:
        """That it has initialised last; empty without any."""
        worlds = self.all(World)
        return worlds[-1].library if worlds else ""

    @property
    def pid(self) -> int:
        return self.all(Started)[0].pid

    @property
    def ended(self) -> Ended | None:
        """How it has ended by itself, if it has."""
        return next(iter(self.all(Ended)), None)

    @property
    def error(self) -> str | None:
        """The error that has ended it, in a line."""
        return self.ended.reason if self.ended and self.ended.reason not in ("steps", "script") else None

    @property
    def wait(self) -> Waiting | None:
        """What it waits for, if it does."""
        return self.records[-1] if isinstance(self.records[-1], Waiting) else None

    @property
    def position(self) -> tuple[object, ...]:
        """How far it has come with what all ranks do together; differs between ranks that wait for each other."""
        collectives = self.all(Collective)
        last = collectives[-1] if collectives else None
        return (len(collectives), last and (last.kind, last.name, last.shape), self.wait)

    def steps(self, optimizer: int = 1) -> list[Step]:
        """The steps of one of its optimizers."""
        return [step for step in self.all(Step) if step.optimizer == optimizer]

    @property
    def training_loops(self) -> list[Loop]:
        """The loops during which it stepped, in order."""
        trained = {step.loop for step in self.steps()}
        return [loop for loop in self.all(Loop) if loop.number in trained]

    def indices(self, loop: Loop) -> list[int]:
        """Of the samples that a loop's loader has drawn."""
        return [index for batch in self.all(Batch) if batch.loop == loop.number for index in batch.indices]

    def rows(self, loop: Loop) -> list[str]:
        """Digests of the samples that it has trained on in a loop."""
        return [row for one in self.forwards(training=True) if one.loop == loop.number for row in one.rows]

    def forwards(self, *, training: bool) -> list[Forward]:
        """The calls of its models, in training or in evaluation."""
        return [forward for forward in self.all(Forward) if forward.is_training == training]


@dataclass(frozen=True)
class Run:
    """One launch of the script."""

    num_ranks: int
    """That were launched."""
    ranks: tuple[Rank, ...]
    """In their order."""
    stacks: dict[int, str]
    """By rank, where they wait for each other for ever."""
    failure: str = ""
    """In a line, of a script that failed after all ranks had stepped."""

    @property
    def is_deserted(self) -> bool:
        """Whether a rank has ended by itself as if all was well, and another then failed."""
        has_left = any(rank.ended and rank.ended.reason == "script" for rank in self.ranks)
        return has_left and any(rank.error for rank in self.ranks)

    @property
    def was_seen(self) -> bool:
        """Whether it was ended since it was seen enough: a rank may then fail in the step that another has ended in."""
        num_steps = [len(rank.steps()) for rank in self.ranks]
        is_over = all(
            rank.ended and (rank.ended.reason == "steps" or (rank.error and number >= max(num_steps) - 1))
            for rank, number in zip(self.ranks, num_steps, strict=True)
        )
        return is_over and any(rank.ended and rank.ended.reason == "steps" for rank in self.ranks)

    @property
    def library(self) -> str:
        """That rank 0 has initialised last."""
        return self.ranks[0].library if self.ranks else ""

    @property
    def uses_adasum(self) -> bool:
        """Whether a reduction of Horovod's is Adasum, which makes neither a mean nor a sum."""
        return any(
            isinstance(record, (Wrapped, Collective)) and record.operation == "adasum"
            for rank in self.ranks
            for record in rank.records
        )

    @property
    def writes(self) -> list[Write]:
        return [write for rank in self.ranks for write in rank.all(Write)]

    @property
    def num_optimizers(self) -> int:
        return max((step.optimizer for rank in self.ranks for step in rank.all(Step)), default=0)

    def steps(self, optimizer: int = 1) -> Iterator[tuple[Step, ...]]:
        """The steps that all ranks took, one of each rank together."""
        return zip(*(rank.steps(optimizer) for rank in self.ranks), strict=False)


@dataclass(frozen=True)
class Runs:
    """Both launches."""

    alone: Run | None
    """On one rank; None where the script starts its ranks itself."""
    together: Run
