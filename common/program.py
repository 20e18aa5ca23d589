"""Training from a program of the user's own: what it hands over, its keywords as flags, and what it gets back.

`pytorch/program.py` and `tensorflow/program.py` have the `Session` that a program makes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from allstep.common.launch.placement import placement
from allstep.common.process.errors import UserError
from allstep.common.process.exit import run_rank
from allstep.common.reporting.base import Listeners, Reporter
from allstep.common.user_file import PROGRAM

if TYPE_CHECKING:
    from allstep.common.config.train_config import TrainConfig
    from allstep.common.progress import Progress
    from allstep.common.session import Session

Result = TypeVar("Result")


class History(Reporter):
    """Keeps the events `epoch` of a run, of which every rank has the same."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, Any]] = []

    def event(self, name: str, **fields: Any) -> None:
        if name == "epoch":
            self.epochs.append(fields)


def check(*, elastic: bool) -> None:
    """Refuse what a program cannot have.

    Raises:
        UserError: the flags ask for an elastic job.
    """
    if elastic:
        raise UserError(
            "expected a job of a fixed number of ranks for a Session, received elastic=True; leave it out, or train by "
            "train.py with --model FILE.py:FUNCTION and --dataset FILE.py:FUNCTION"
        )


def train(session: Session) -> list[dict[str, Any]]:
    """Train, and return the fields of each event `epoch`."""
    history, open_reporter = History(), session.open_reporter

    def with_history(config: TrainConfig, rank: int, progress: Progress) -> Reporter:
        return Listeners([open_reporter(config, rank, progress), history])

    dataclasses.replace(session, open_reporter=with_history).train()
    return history.epochs


def as_rank(function: Callable[[], Result]) -> Result:
    """What a function returns. As one of several ranks, this process ends where it raises, and the job with it.

    Alone, errors are the program's to catch.
    """
    if placement().world_size == 1:
        return function()
    results: list[Result] = []
    run_rank(lambda: results.append(function()))
    return results[0]


def as_words(flags: Mapping[str, Any]) -> list[str]:
    """Keywords as the words of a command line; those that are None are left out."""
    words = ["--model", PROGRAM, "--dataset", PROGRAM]
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
            words += [f"--{flag}", *map(str, values)]
    return words
