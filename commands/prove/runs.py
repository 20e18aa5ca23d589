"""Observed runs of a script: the records of its ranks, on one rank and on several."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from allstep.commands.prove.rank import Rank, is_join
from allstep.commands.prove.records import (
    POINT_TO_POINT,
    TENSOR_PARALLEL,
    UNNAMED,
    Collective,
    Forward,
    Loop,
    Record,
    Step,
    Unseen,
    Wrapped,
    Write,
)

_FIRST_STEPS = 3
"""Steps whose losses tell whether ranks share the work on the same samples."""


@dataclass(frozen=True)
class Run:
    """One launch of the script."""

    num_ranks: int
    """Number of ranks that were launched."""
    ranks: tuple[Rank, ...]
    """Ranks in order."""
    stacks: dict[int, str]
    """Stacks of the ranks, by rank, if they are in a deadlock."""
    failure: str = ""
    """Error, in one line, of a script that failed after all ranks had stepped."""

    @property
    def first_group(self) -> Run:
        """The run of the ranks of rank 0's DDP, if others begin with other weights, as in an ensemble."""
        group = next((one.ranks for rank in self.ranks[:1] for one in rank.all(Wrapped)), ())
        own = tuple(rank for rank in self.ranks if rank.number in group)
        first = [[step.weights for step in rank.steps()[:1]] for rank in self.ranks]
        others = [one for rank, one in zip(self.ranks, first, strict=True) if rank not in own]
        return replace(self, num_ranks=len(own), ranks=own) if own and others and first[0] not in others else self

    @property
    def without_experts(self) -> Run:
        """The run without weights of which each rank has its own, as of the experts of a model (expert parallelism).

        Calls of the model exchange activations, and gradients of other weights are averaged.
        """
        calls = [[one for one in rank.forwards(training=True) if one.step == 1] for rank in self.ranks]
        kinds = ["".join(one.collectives).replace("_", "") for own in calls for one in own]
        if self.num_ranks == 1 or not kinds or not all("alltoall" in one or "gather" in one for one in kinds):
            return self
        if self.shares_work and set.intersection(*({row for one in own for row in one.rows} for own in calls)):
            return self
        differ, computed, experts = set[str](), set[str](), set[str]()
        for optimizer in range(1, self.num_optimizers + 1):
            first = next(self.steps(optimizer), ())
            differ |= _apart([step.weights for step in first])
            computed |= _apart([{one.name: one.local for one in step.gradients} for step in first])
            experts |= _apart([{one.name: one.applied for one in step.gradients} for step in first])
        if own := experts & differ:  # other weights of an expert, such as biases, may begin alike
            parts = {f"{name.rsplit('.', depth)[0]}." for name in own for depth in (1, 2)}
            experts = own | {name for name in experts if any(_is_beside(name, part) for part in parts)}
        elif "alltoall" not in kinds[0] or computed <= experts:  # other gradients are not averaged either
            return self
        experts |= differ - computed  # whose gradients tell nothing
        unseen = Unseen("weights of experts, of which each rank has its own", "calls of the model exchange activations")
        ranks = (Rank((unseen, *(_without(one, experts) for one in rank.records))) for rank in self.ranks)
        return replace(self, ranks=tuple(ranks))

    @property
    def joins(self) -> bool:
        """Whether ranks wait, after their last batches, for ranks that have more, which take more steps."""
        return any(is_join(one) for rank in self.ranks for one in rank.records)

    @property
    def is_deserted(self) -> bool:
        """Whether a rank has ended by itself without an error, while another has failed."""
        if self.joins:
            return False
        has_left = any(rank.ended and rank.ended.reason == "script" for rank in self.ranks)
        return has_left and any(rank.error for rank in self.ranks)

    @property
    def was_seen(self) -> bool:
        """Whether the run was ended after enough was observed; a rank may then fail in a step in which another ends."""
        num_steps = [len(rank.steps()) for rank in self.ranks]
        is_over = all(
            rank.ended
            and (
                rank.ended.reason == "steps" or (rank.error and number and (self.joins or number >= max(num_steps) - 1))
            )
            for rank, number in zip(self.ranks, num_steps, strict=True)
        )
        return is_over and any(rank.ended and rank.ended.reason == "steps" for rank in self.ranks)

    @property
    def library(self) -> str:
        """Library that rank 0 has initialised last."""
        return self.ranks[0].library if self.ranks else ""

    def has(self, operation: str) -> bool:
        """Return whether a wrapper or a reduction of Horovod has an operation, such as ADASUM."""
        records = (one for rank in self.ranks for one in rank.records if isinstance(one, (Wrapped, Collective)))
        return any(one.operation == operation for one in records)

    @property
    def keeps_buffers(self) -> bool:
        """Whether DDP is asked not to send rank 0's buffers."""
        return any(one.keeps_buffers for rank in self.ranks for one in rank.all(Wrapped))

    @cached_property
    def shares_work(self) -> bool:
        """Whether ranks share the work on the same samples: by tensor parallelism, or as stages of a pipeline.

        Only the last stage of a pipeline has a loss. Tensor parallelism written by hand gives ranks other weights, and
        the same losses of the same samples.
        """
        if self.splits_layers:
            return True
        first = list(itertools.islice(self.steps(), _FIRST_STEPS))
        if self.has(TENSOR_PARALLEL) or self.num_ranks == 1 or len(first) < _FIRST_STEPS:
            return self.has(TENSOR_PARALLEL)
        losses = [[step.loss for step in steps if step.loss is not None] for steps in first]
        calls = (one for rank in self.ranks for one in rank.all(Collective))
        if any(one.kind in POINT_TO_POINT for one in calls):
            return all(0 < len(own) < self.num_ranks for own in losses)
        calls = [[one for one in rank.forwards(training=True) if one.step <= _FIRST_STEPS] for rank in self.ranks]
        rows = [{row for one in own for row in one.rows} for own in calls]
        if all(rows) and not set.intersection(*rows):
            return False
        are_equal = all(len(own) == self.num_ranks and np.ptp(own) <= 1e-5 * np.abs(own).max() for own in losses)
        # Weights outside of a model that is called are copies, such as the shards of a ZeRO by hand.
        names = [name for name in first[0][0].weights if not (all(rows) and name.startswith(UNNAMED))]
        differ = [len({step.weights.get(name) for step in first[0]}) > 1 for name in names]
        return are_equal and losses[0] != losses[1] and any(differ) and first[0][0].gradients != first[0][1].gradients

    @cached_property
    def splits_layers(self) -> bool:
        """Whether each rank has parts of some layers, in a script's own tensor parallelism, which has no wrapper.

        Calls of the model add up parts of activations, some weights are the same on all ranks, and some are not.
        """
        first = next(self.steps(), ())
        calls = [one for rank in self.ranks for one in rank.forwards(training=True) if one.step == 1]
        adds_up = all(any("reduce" in kind for kind in one.collectives) for one in calls)
        if self.num_ranks == 1 or not first or not calls or not adds_up or any(step.wrapper for step in first):
            return False
        applied = {tuple(one.applied for one in step.gradients) for step in first}
        differ = {len({step.weights.get(name) for step in first}) > 1 for name in first[0].weights}
        return differ == {True, False} and len(applied) > 1

    @property
    def writes(self) -> list[Write]:
        return [write for rank in self.ranks for write in rank.all(Write)]

    @property
    def num_optimizers(self) -> int:
        return max((step.optimizer for rank in self.ranks for step in rank.all(Step)), default=0)

    def steps(self, optimizer: int = 1) -> Iterator[tuple[Step, ...]]:
        """Return an iterator over the steps that all ranks took, with one step of each rank in a tuple.

        After a join, ranks step together again: those with more batches have taken more steps before.
        """
        rounds = (rank.rounds(optimizer) for rank in self.ranks)
        return (steps for one in zip(*rounds, strict=False) for steps in zip(*one, strict=False))


def _apart(values: Sequence[Mapping[str, object]]) -> set[str]:
    """Return the names for which ranks have other values."""
    return {name for own in values[:1] for name in own if len({other.get(name) for other in values}) > 1}


def _without(record: Record, names: set[str]) -> Record:
    """Return a record without some weights, and their gradients and slots."""
    if isinstance(record, Forward):
        return replace(record, weights="")
    if not isinstance(record, Step):
        return record
    weights = {name: one for name, one in record.weights.items() if name not in names}
    state = {name: one for name, one in record.state.items() if name.rpartition(".")[0] not in names}
    gradients = tuple(one for one in record.gradients if one.name not in names)
    return replace(record, weights=weights, state=state, gradients=gradients)


def _is_beside(name: str, part: str) -> bool:
    """Return whether a weight is in a part of a model, and none of a router there, which all ranks share."""
    return name.startswith(part) and not re.search("gate|router", name.removeprefix(part))


@dataclass(frozen=True)
class Runs:
    """Both runs of a script."""

    alone: Run | None
    """Run on one rank; None if the script starts its ranks itself."""
    together: Run
    script: Path | None = None
    """Path of the script, whose text tells some checks more."""

    def __post_init__(self) -> None:
        """Leave out other groups of ranks, and optimizers that not all ranks have, such as one of rank 0 alone."""
        object.__setattr__(self, "together", self.together.first_group.without_experts)
        ranks = [rank.optimizers for rank in self.together.ranks if rank.optimizers]
        common = [key for key in ranks[0] if all(key in one for one in ranks)] if ranks else []
        for name in ("alone", "together") if common and len({len(one) for one in ranks}) > 1 else ():
            run = getattr(self, name)
            if run and all(key in rank.optimizers for rank in run.ranks for key in common):
                own = tuple(rank.with_optimizers(common) for rank in run.ranks)
                object.__setattr__(self, name, replace(run, ranks=own))

    @property
    def first_loop_alone(self) -> list[Loop]:
        """The first training loop on one rank; empty without any, or without that run."""
        return self.alone.ranks[0].training_loops[:1] if self.alone else []
