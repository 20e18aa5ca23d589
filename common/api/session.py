"""Training from a user's program: conversion of keywords to flags, errors of ranks, and the history of a run.

`pytorch/session.py` and `tensorflow/session.py` define the `TrainingRun` that a program creates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from allstep.common.base.errors import UserError
from allstep.common.catalog.user_file import PROGRAM
from allstep.common.launch.placement import find_placement
from allstep.common.process.exit import run_rank
from allstep.common.reporting.base import Listeners, Reporter

if TYPE_CHECKING:
    from allstep.common.config.train_config import TrainConfig
    from allstep.common.recipe.progress import Progress
    from allstep.common.training.training_run import TrainingRun

Result = TypeVar("Result")


class History(Reporter):
    """Reporter that keeps the events `epoch` of a run, which are the same on every rank."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, Any]] = []

    def event(self, name: str, **fields: Any) -> None:
        if name == "epoch":
            self.epochs.append(fields)


def check(*, elastic: bool) -> None:
    """Refuse flags that a program cannot use.

    Raises:
        UserError: the flags ask for an elastic job.
    """
    if elastic:
        raise UserError(
            "expected a job of a fixed number of ranks for a Session, received elastic=True; leave it out, or train by "
            "train.py with --model FILE.py:FUNCTION and --dataset FILE.py:FUNCTION"
        )


def train(session: TrainingRun) -> list[dict[str, Any]]:
    """Train, and return the fields of each event `epoch`."""
    history, open_reporter = History(), session.open_reporter

    def with_history(config: TrainConfig, rank: int, progress: Progress) -> Reporter:
        return Listeners([open_reporter(config, rank, progress), history])

    dataclasses.replace(session, open_reporter=with_history).train()
    return history.epochs


def as_rank(function: Callable[[], Result]) -> Result:
    """Return the result of a function; if it raises on one of several ranks, end this process and so the job.

    In a job with a single rank, the program can catch the exception.
    """
    if find_placement().world_size == 1:
        return function()
    results: list[Result] = []
    run_rank(lambda: results.append(function()))
    return results[0]


def as_words(flags: Mapping[str, Any]) -> list[str]:
    """Return keywords as the words of a command line, without those that are None."""
    words = ["--model", PROGRAM, "--dataset", PROGRAM]
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
            words += [f"--{flag}", *map(str, values)]
    return words
