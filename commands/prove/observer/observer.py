"""State shared by all observers of a process: its journal, the script's lines, and its progress."""

import atexit
import contextlib
import json
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from allstep.commands.prove.observer import progress
from allstep.commands.prove.observer.guarding import Guard, Observation
from allstep.commands.prove.observer.progress import Progress
from allstep.commands.prove.records import (
    BY_LOSSES,
    FOLLOWS_LOSSES,
    Ended,
    Held,
    Loop,
    Record,
    Resumed,
    Started,
    Unseen,
    Waiting,
)
from allstep.common.catalog.user_modules import is_installed
from allstep.common.files.strict_json import to_json
from allstep.common.launch.placement import apparent_rank

_FOLDER = os.path.dirname(__file__)
_FAILURE_SECONDS = 2.0
"""Delay of a failed rank's exit, upon which the launcher kills the others, so that these can record the same step."""


@dataclass(frozen=True)
class Settings:
    """Settings of the observer in a rank."""

    folder: str
    """Folder for journals and kept files."""
    script: str
    """Path of the script, as on the command line."""
    num_steps: int
    """Number of steps to observe in the second epoch; the first one has three times as many."""
    num_devices: int | None = None
    """Number of devices that a mirrored strategy of tf.distribute gets."""
    keeps_files: bool = False
    """Whether the contents of files are kept before they are overwritten in training."""


class Observer:
    """Observer of one process."""

    def __init__(self, settings: Settings, guard_class: type[Guard] = Guard) -> None:
        self.folder = Path(settings.folder)
        self.num_devices = settings.num_devices
        self.keeps_files = settings.keeps_files
        self.progress = Progress(settings.num_steps)
        self._num_loops = 0
        self.collectives: Counter[str] = Counter()
        self.is_in_fit = self.cuts_epoch = False
        self._name = os.path.basename(settings.script)
        path = settings.script  # which Python joins to the folder as it is, such as ../train.py
        self._script = (path, os.path.abspath(path), os.path.join(os.getcwd(), path))
        self._journals: dict[tuple[int, int], Any] = {}  # by process id (also of forked processes) and replica
        self._lock = threading.RLock()
        self._depth = threading.local()
        self._error: str | None = None
        self._error_line = ""
        self._has_ended = self._is_looking = False
        self._last_look: Callable[[], Held | None] = lambda: None
        self._unseen: set[str] = set()
        guard = guard_class(self.note_unseen)
        self.quiet, self.around = guard.quiet, guard.around
        sys.excepthook = self._wrap_excepthook(sys.excepthook)
        atexit.register(self.quiet("the end of the script", self.end), "script")

    def write(self, record: Record, replica: int = 0) -> None:
        """Write a record of a replica of this process and flush it, since a rank may end at any moment."""
        with self._lock:
            if self._is_looking and not isinstance(record, Held):
                return  # the observer does this, not the script
            key = pid, _ = os.getpid(), replica
            if key not in self._journals:
                self._journals[key] = open(self.folder / f"{pid}.{replica}.jsonl", "a", buffering=1)  # noqa: SIM115
                self.write(Started(pid, apparent_rank()), replica)
            # One write per line, which the line-buffered file passes on at the end of the line.
            self._journals[key].write(json.dumps({"event": type(record).__name__, **to_json(record)}) + "\n")

    def note_unseen(self, what: str, reason: Exception | str) -> None:
        """Record once that something cannot be observed, upon which the script goes on unobserved."""
        if what not in self._unseen:
            self._unseen.add(what)
            text = headline(f"{type(reason).__name__}: {reason}" if isinstance(reason, Exception) else reason)
            with contextlib.suppress(Exception):
                self.write(Unseen(what, text))

    def watch_scheduler(self, scheduler: type, method: str) -> None:
        """Note the use of a kind of scheduler that lowers rates by losses, by the method that does so."""

        def observe(*_args: Any, **_kwargs: Any) -> Generator[None, Any, None]:
            self.note_unseen(FOLLOWS_LOSSES, BY_LOSSES)
            yield

        replace(scheduler, method, self.around("schedulers that follow losses", observe))

    def line(self) -> str:
        """Return the innermost line of the script that is being run; empty if there is none."""
        return self._line_of(sys._getframe(1))

    def callers(self) -> tuple[str, ...]:
        """Return all lines of the script that are being run, from the innermost to the outermost."""
        return tuple(f"{self._name}:{frame.f_lineno}" for frame in self.frames())

    def frames(self) -> Iterator[FrameType]:
        """Yield the frames of the script, from the innermost to the outermost."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename in self._script:
                yield frame
            frame = frame.f_back

    def is_by_library(self) -> bool:
        """Return whether a library calls what is observed, rather than the script itself."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and os.path.dirname(frame.f_code.co_filename) == _FOLDER:
            frame = frame.f_back
        return frame is not None and is_installed(frame.f_code.co_filename)

    def line_of_main(self) -> str:
        """Return `line()`, or the main thread's line if this thread runs no line of the script."""
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
        """Record that the rank may wait for others within the block; blocks inside of it are not recorded."""
        depth = getattr(self._depth, "value", 0)
        self._depth.value = depth + 1
        thread = 0 if threading.current_thread() is threading.main_thread() else threading.get_ident()
        if not depth:
            self.write(Waiting(what, self.line(), computes, thread))
        try:
            yield
        finally:
            self._depth.value = depth
            if not depth:
                self.write(Resumed(thread))

    def while_waiting(self, what: str, then: Callable[..., None] = lambda *_args, **_kwargs: None) -> Observation:
        """Return an observation of calls that may wait for other ranks; `then` gets their arguments afterwards."""

        def observe(*args: Any, **kwargs: Any) -> Generator[None, Any, None]:
            with self.waiting(what):
                yield
            then(*args, **kwargs)

        return observe

    @property
    def is_inside(self) -> bool:
        """Whether this thread is in a block of `waiting`."""
        return getattr(self._depth, "value", 0) > 0

    def begin_loop(self, num_batches: int | None, *, may_end_early: bool | None = None, **fields: Any) -> Loop:
        """Record that the script begins to iterate; `may_end_early` is inferred from its text if not given."""
        self._num_loops += 1
        line = self.line()
        if may_end_early is None:
            may_end_early = progress.may_end_early(self.script, int(line.rpartition(":")[2] or 0))
        loop = Loop(self._num_loops, line, num_batches, may_end_early=may_end_early, **fields)
        self.write(loop)
        return loop

    @property
    def script(self) -> str:
        """Absolute path of the script."""
        return self._script[1]

    def is_of_script(self, frame: FrameType) -> bool:
        """Return whether a frame runs lines of the script, not of a library."""
        return frame.f_code.co_filename in self._script

    def may_stop(self, frame: FrameType | None) -> bool:
        """Return whether an iteration that goes on in `frame` may be ended there."""
        return progress.may_stop(frame, self._script)

    def look_last(self, look: Callable[[], Held | None]) -> None:
        """Have a function inspect a data set when the script has ended, and thus cannot be disturbed any more."""
        self._last_look = look

    def stop(self) -> None:
        """Exit as the script itself would, so that exit handlers of the script and its libraries run."""
        self.end("steps")
        raise SystemExit(0)

    def end(self, reason: str) -> None:
        """Record how the process ends; only the first reason counts."""
        own = [replica for pid, replica in self._journals if pid == os.getpid()]
        if not self._has_ended and own:
            self._has_ended = True
            if not self._error:
                self._look()
            for replica in own:
                self.write(Ended(self._error or reason, self._error_line or self.line()), replica)

    def _look(self) -> None:
        self._is_looking = True
        with contextlib.suppress(Exception):  # user code, called at a time for which it was not written
            if held := self._last_look():
                self.write(held)
        self._is_looking = False

    def _wrap_excepthook(self, hook: Callable[..., None]) -> Callable[..., None]:
        note = self.quiet("the script's error", self._note_error)

        def excepthook(kind: type[BaseException], error: BaseException, stack: Any) -> None:
            note(kind, error, stack)
            hook(kind, error, stack)
            if self.progress.num_steps:
                time.sleep(_FAILURE_SECONDS)

        return excepthook

    def _note_error(self, kind: type[BaseException], error: BaseException, stack: TracebackType | None) -> None:
        cause = headline(str(error))
        self._error = cause if cause.startswith(f"{kind.__name__}: ") else f"{kind.__name__}: {cause}"
        while stack is not None:
            if stack.tb_frame.f_code.co_filename in self._script:
                self._error_line = f"{self._name}:{stack.tb_lineno}"
            stack = stack.tb_next
        self.end(self._error)


def headline(text: str) -> str:
    """Return the line of an error's text that names the cause.

    In errors of a function that TensorFlow traces, it follows the lines of the script; in those of a graph, the node's.
    """
    lines = text.strip().splitlines() or [""]
    if lines[0] == "in user code:":
        causes = [line.strip() for line in lines if re.match(r"    \w*(Error|Exception)\b", line)]
        return causes[-1] if causes else lines[-1].strip()
    if not lines[0].startswith("Graph execution error"):
        return lines[0]
    roots = [line.strip() for line in lines if line.startswith("  (0) ")]
    return (roots or [line for line in lines if line and not line[0].isspace()])[-1]


def owner_of(name: str, kind: type) -> type:
    """Return the class from which a class has one of its attributes."""
    return next(one for one in kind.__mro__ if name in vars(one))


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute by what `make` returns for it."""
    setattr(owner, name, make(getattr(owner, name)))


def replace_everywhere(package: str, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function of the module `owner` in all modules of a package that have imported it under its name."""
    old = getattr(owner, name)
    new = make(old)
    for key, module in list(sys.modules.items()):
        if key.startswith(package) and vars(module).get(name) is old:
            setattr(module, name, new)
