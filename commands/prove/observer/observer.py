"""What all observers of a process share: its journal, the lines of its script, and when it has been seen enough."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from allstep.commands.prove.observer import loops
from allstep.commands.prove.records import Ended, Held, Loop, Record, Resumed, Sampler, Started, Waiting
from allstep.common.files.records import to_json
from allstep.common.launch.placement import apparent_rank

_NUM_EPOCHS = 2
_MORE_STEPS = 10
_FAILURE_SECONDS = 2.0
"""From a rank's failure to its end, upon which the launcher ends the others: for them to write down the same step."""


@dataclass(frozen=True)
class Settings:
    """What a rank needs to know of its observation."""

    folder: str
    """Where it writes."""
    script: str
    """As on the command line."""
    num_steps: int
    """That are looked at in each of the first two epochs."""
    num_devices: int | None = None
    """That a mirrored strategy of tf.distribute is to have."""
    keeps_files: bool = False
    """Whether what files held is kept before they are written in training."""


class Observer:
    """Of one process."""

    def __init__(self, settings: Settings) -> None:
        self.folder = Path(settings.folder)
        self.num_steps = settings.num_steps
        self.num_devices = settings.num_devices
        self.keeps_files = settings.keeps_files
        self.num_loops = 0
        self._num_steps: Counter[int] = Counter()  # by replica
        self.is_in_fit = False
        self._name = os.path.basename(settings.script)
        self._script = (settings.script, os.path.abspath(settings.script))
        self._training_loops: list[int] = []
        self._journals: dict[tuple[int, int], Any] = {}  # by replica of this process, or of one that it forks
        self._lock = threading.RLock()
        self._depth = threading.local()
        self._error: str | None = None
        self._has_ended = self._is_looking = False
        self._last_look: Callable[[], Held | None] = lambda: None
        sys.excepthook = self._note_error(sys.excepthook)
        atexit.register(self.end, "script")

    def write(self, record: Record, replica: int = 0) -> None:
        """Write a record of a replica of this process down, for good: a rank may end at any moment."""
        with self._lock:
            if self._is_looking and not isinstance(record, Held):
                return  # it is not the script that does this
            key = pid, _ = os.getpid(), replica
            if key not in self._journals:
                self._journals[key] = open(self.folder / f"{pid}.{replica}.jsonl", "a", buffering=1)  # noqa: SIM115
                self.write(Started(pid, apparent_rank()), replica)
            # One write a line, which the file's buffer of a line passes on at its end.
            self._journals[key].write(json.dumps({"event": type(record).__name__, **to_json(record)}) + "\n")

    def line(self) -> str:
        """Where the script is: its innermost line that is being run."""
        return self._line_of(sys._getframe(1))

    def line_of_main(self) -> str:
        """The same, or where the main thread is, if it has another thread do its work."""
        main = threading.main_thread().ident
        return self.line() or self._line_of(sys._current_frames().get(main or 0))

    def _line_of(self, frame: FrameType | None) -> str:
        while frame is not None:
            if frame.f_code.co_filename in self._script:
                return f"{self._name}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    @contextlib.contextmanager
    def waiting(self, what: str, *, computes: bool = False) -> Iterator[None]:
        """A block in which the rank may wait for others; what waits inside of it is a part of it."""
        depth = getattr(self._depth, "value", 0)
        self._depth.value = depth + 1
        if not depth:
            self.write(Waiting(what, self.line(), computes))
        try:
            yield
        finally:
            self._depth.value = depth
            if not depth:
                self.write(Resumed())

    @property
    def is_inside(self) -> bool:
        """Whether this thread is in such a block."""
        return getattr(self._depth, "value", 0) > 0

    def begin_loop(
        self,
        num_batches: int | None,
        *,
        batch_size: int | None = None,
        num_samples: int | None = None,
        sampler: Sampler | None = None,
        may_end_early: bool | None = None,
    ) -> Loop:
        """Write down that the script begins to iterate; `may_end_early` is by its text where it is not given."""
        self.num_loops += 1
        line = self.line()
        if may_end_early is None:
            may_end_early = loops.may_end_early(self._script[1], int(line.rpartition(":")[2] or 0))
        loop = Loop(self.num_loops, line, num_batches, batch_size, num_samples, sampler, may_end_early)
        self.write(loop)
        return loop

    @property
    def first_training_loop(self) -> int | None:
        """Its number."""
        return next(iter(self._training_loops), None)

    def look_last(self, look: Callable[[], Held | None]) -> None:
        """Have a function say what a data set holds, when the script is at its end and cannot be disturbed any more."""
        self._last_look = look

    @property
    def max_batches(self) -> int:
        """Of the loop that is being run: after the epochs that are looked at, one each, on the way to its end."""
        is_later = len(self._training_loops) > _NUM_EPOCHS or (
            len(self._training_loops) == _NUM_EPOCHS and self._training_loops[-1] != self.num_loops
        )
        return 1 if is_later else self.num_steps

    @property
    def num_steps_seen(self) -> int:
        """Of the process, or of its first replica."""
        return self.num_steps_of(0)

    def num_steps_of(self, replica: int) -> int:
        """Of a replica."""
        return self._num_steps[replica]

    def end_step(self, replica: int = 0) -> bool:
        """Count a step; returns whether the process has been seen enough."""
        self._num_steps[replica] += 1
        if replica:
            return False
        if self.num_loops and self.num_loops not in self._training_loops:
            self._training_loops.append(self.num_loops)
        return self.is_enough

    @property
    def is_enough(self) -> bool:
        """Whether the process has been seen enough."""
        return self.num_steps_seen >= _NUM_EPOCHS * self.num_steps + _MORE_STEPS

    def stop(self) -> None:
        """End the script as its own exit would: what it and its libraries have to do at their ends is done."""
        self.end("steps")
        raise SystemExit(0)

    def end(self, reason: str) -> None:
        """Write down how it ends; the first reason counts."""
        own = [replica for pid, replica in self._journals if pid == os.getpid()]
        if not self._has_ended and own:
            self._has_ended = True
            if not self._error and not self.keeps_files:  # several ranks alone are compared with each other
                self._look()
            for replica in own:
                self.write(Ended(self._error or reason, self.line()), replica)

    def _look(self) -> None:
        self._is_looking = True
        with contextlib.suppress(Exception):  # a stranger's code, at a time that it was not made for
            if held := self._last_look():
                self.write(held)
        self._is_looking = False

    def _note_error(self, hook: Callable[..., None]) -> Callable[..., None]:
        def excepthook(kind: type[BaseException], error: BaseException, stack: Any) -> None:
            cause = headline(str(error))
            self._error = cause if cause.startswith(f"{kind.__name__}: ") else f"{kind.__name__}: {cause}"
            self.end(self._error)
            hook(kind, error, stack)
            if self.num_steps_seen:
                time.sleep(_FAILURE_SECONDS)

        return excepthook


def headline(text: str) -> str:
    """The line of an error's text that names the cause.

    Of a function that TensorFlow traces it is below the places in the script, of a graph of it below those of the node.
    """
    lines = text.strip().splitlines() or [""]
    if lines[0] == "in user code:":
        causes = [line.strip() for line in lines if re.match(r"    \w*(Error|Exception)\b", line)]
        return causes[-1] if causes else lines[-1].strip()
    if not lines[0].startswith("Graph execution error"):
        return lines[0]
    return [line for line in lines if line and not line[0].isspace()][-1]


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put what `make` makes of an attribute in its place."""
    setattr(owner, name, make(getattr(owner, name)))


def replace_everywhere(package: str, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """The same of a function of the module `owner`, in all modules of a package that have imported it by its name."""
    old = getattr(owner, name)
    new = make(old)
    for key, module in list(sys.modules.items()):
        if key.startswith(package) and vars(module).get(name) is old:
            setattr(module, name, new)
