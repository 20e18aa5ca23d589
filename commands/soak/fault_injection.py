"""A trainer of which one rank goes wrong at a given step, for `allstep soak` and the tests of faults.

    python -m allstep.commands.soak.fault_injection FRAMEWORK FAULT RANK STEP [FLAGS of the trainer]

FAULT is `raises`, `raises-writing` (while a slow disk still writes a checkpoint), `stuck` (in the input pipeline),
`hangs` (at the end of a step), `leaves-out` (a step, and with it a collective) or `lingers` (after the last epoch,
whatever STEP is).
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from allstep.commands.shared.rank import open_session
from allstep.common.checkpoint.files import TEMPORARY
from allstep.common.process.exit import run_rank
from allstep.common.training.hooks import Hook

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
    """Another object, but for what a subclass does differently."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


class _FaultyOnce(Wrapped):
    """An object of which one call goes wrong."""

    def __init__(self, original: Any, step: int, instead: Callable[..., Any]) -> None:
        """`instead` is called with the method and its arguments, in the call of number `step`."""
        super().__init__(original)
        self._step, self._instead, self._numbers = step, instead, itertools.count(1)

    def _call(self, method: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        if next(self._numbers) == self._step:
            return self._instead(method, *arguments, **keywords)
        return method(*arguments, **keywords)


class FaultyWorker(_FaultyOnce):
    """A worker of which one training step goes wrong."""

    def train_step(self, *arguments: Any) -> Any:
        return self._call(self.original.train_step, *arguments)


class FaultySplit(_FaultyOnce):
    """Samples that go wrong where one batch of them is read, by the training loop itself."""

    parallel = False

    def __len__(self) -> int:
        return len(self.original)

    def read(self, *arguments: Any, **keywords: Any) -> Any:
        return self._call(self.original.read, *arguments, **keywords)


def raise_at(session: TrainingRun, step: int) -> TrainingRun:
    """Raise in the training step of that number."""

    def fail(*_: object) -> None:
        raise OSError("lost the disk")

    return _with_step(session, step, fail)


def raise_while_writing(session: TrainingRun, step: int) -> TrainingRun:
    """Raise in the training step of that number, while the checkpoint before it is being written for seconds."""

    def slow_disk(event: str, arguments: tuple) -> None:
        if event == "os.mkdir" and Path(arguments[0]).name.startswith(TEMPORARY):
            time.sleep(8)

    sys.addaudithook(slow_disk)
    return raise_at(session, step)


def leave_out(session: TrainingRun, step: int) -> TrainingRun:
    """Do nothing in the training step of that number."""
    return _with_step(session, step, lambda *_: np.float32(0))


def hang_after(session: TrainingRun, step: int) -> TrainingRun:
    """Never return from the training step of that number; the other ranks have all that they need of it."""

    def hang(train_step: Callable, *arguments: object) -> None:
        float(train_step(*arguments))
        time.sleep(1e6)

    return _with_step(session, step, hang)


def get_stuck_at(session: TrainingRun, step: int) -> TrainingRun:
    """Never get the batch of that number."""
    split = FaultySplit(session.dataset.train, step, lambda *_, **__: time.sleep(1e6))
    return dataclasses.replace(session, dataset=dataclasses.replace(session.dataset, train=split))


def linger(session: TrainingRun, step: int) -> TrainingRun:
    """Train to the end, and never leave."""

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


def _with_step(session: TrainingRun, step: int, instead: Callable) -> TrainingRun:
    return dataclasses.replace(session, worker=FaultyWorker(session.worker, step, instead))


if __name__ == "__main__":
    run_rank(main)
