"""Trainer in which one rank fails at a given step, for `allstep soak` and the tests of faults.

    python -m allstep.commands.soak.fault_injection FRAMEWORK FAULT RANK STEP [FLAGS of the trainer]

FAULT is `raises`, `raises-writing` (while a slow disk still writes a checkpoint), `stuck` (in the input pipeline),
`hangs` (at the end of a step), `leaves-out` (skips a step, and with it a collective) or `lingers` (does not exit after
the last epoch, whatever STEP is).
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from allstep.commands.shared.rank import open_session
from allstep.common.checkpoint.directories import TEMPORARY
from allstep.common.process.exit import run_rank
from allstep.common.training.hooks import Hook
from allstep.common.training.worker import StepResult

if TYPE_CHECKING:
    from allstep.common.training.training_run import TrainingRun


def main(argv: Sequence[str] | None = None) -> None:
    """Train until the fault."""
    framework, fault, rank, step, *flags = sys.argv[1:] if argv is None else argv
    session = open_session(framework, flags)
    if session is None:
        return
    if session.placement.rank == int(rank):
        session = FAULTS[fault](session, int(step))
    session.train()


class Wrapped:
    """Proxy of another object, for subclasses that replace some of its methods."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


class _Split(Wrapped):
    """A split that is read in the training loop's own thread."""

    parallel = False

    def __len__(self) -> int:
        return len(self.original)


def raise_at(session: TrainingRun, step: int) -> TrainingRun:
    """Raise in training step `step`."""

    def fail(*_: object) -> NoReturn:
        raise OSError("lost the disk")

    return _with_step(session, step, fail)


def raise_while_writing(session: TrainingRun, step: int) -> TrainingRun:
    """Raise in training step `step`, while a slow disk still writes the checkpoint before it."""

    def slow_disk(event: str, arguments: tuple) -> None:
        if event == "os.mkdir" and Path(arguments[0]).name.startswith(TEMPORARY):
            time.sleep(8)

    sys.addaudithook(slow_disk)
    return raise_at(session, step)


def leave_out(session: TrainingRun, step: int) -> TrainingRun:
    """Do nothing in training step `step`."""
    return _with_step(session, step, lambda *_: StepResult(0.0))


def hang_after(session: TrainingRun, step: int) -> TrainingRun:
    """Never return from training step `step`, after the other ranks have received all that they need of it."""

    def hang(train_step: Callable, *arguments: object) -> NoReturn:
        float(train_step(*arguments))
        while True:
            time.sleep(1e6)

    return _with_step(session, step, hang)


def get_stuck_at(session: TrainingRun, step: int) -> TrainingRun:
    """Never return the batch of step `step`."""
    split = _Split(session.dataset.train)
    vars(split)["read"] = _once(split.original.read, step, lambda *_, **__: time.sleep(1e6))
    return dataclasses.replace(session, dataset=dataclasses.replace(session.dataset, train=split))


def linger(session: TrainingRun, step: int) -> TrainingRun:
    """Train to the end, but never exit."""

    class Linger(Hook):
        def on_end(self, session: TrainingRun) -> None:
            time.sleep(1e6)

    return dataclasses.replace(session, hooks=[Linger()])


FAULTS = {
    "raises": raise_at,
    "raises-writing": raise_while_writing,
    "stuck": get_stuck_at,
    "hangs": hang_after,
    "leaves-out": leave_out,
    "lingers": linger,
}


def _with_step(session: TrainingRun, step: int, instead: Callable[..., StepResult]) -> TrainingRun:
    worker = Wrapped(session.worker)
    vars(worker)["train_step"] = _once(worker.original.train_step, step, instead)
    return dataclasses.replace(session, worker=worker)


def _once(method: Callable, number: int, instead: Callable) -> Callable:
    """Return the method, except that call `number` goes to `instead`, with the method before its arguments."""
    numbers = itertools.count(1)

    def call(*arguments: Any, **keywords: Any) -> Any:
        if next(numbers) == number:
            return instead(method, *arguments, **keywords)
        return method(*arguments, **keywords)

    return call


if __name__ == "__main__":
    run_rank(main)
