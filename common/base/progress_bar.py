"""Progress of a long command: on a terminal a bar with the time left, elsewhere plain lines.

The bar is on standard error and disappears at the end; lines that a command prints meanwhile appear above it. NO_COLOR
and the terminal's width are respected.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from allstep.common.base.errors import print_line

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_BAR_WIDTH = 20


class ProgressBar:
    """Progress of a command through the parts of its work; a terminal shows it as a bar in a `with` block."""

    def __init__(self, total: float, *, done: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        """`total` is the number of parts, `done` the number that an earlier call has done."""
        self.total, self.done = total, done
        self._clock = clock
        self._began = self._moment = clock()
        self._first = done
        self._bar: Bar | None = None

    def __enter__(self) -> ProgressBar:
        if sys.stderr.isatty():
            self._bar = _bar(self.time_left)
            self._bar.add_task("", total=self.total)
            self._bar.update(self._bar.task_ids[0], completed=self.done)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if self._bar:
            self._bar.stop()

    def begin(self, what: str, *, in_log: bool = True) -> None:
        """Show what is being done: next to the bar or, with `in_log`, in a line with the time left."""
        if self._bar:
            self._bar.update(self._bar.task_ids[0], description=what)
        elif in_log:
            print_line(", ".join(filter(None, (what, self.time_left()))), sys.stderr)

    def advance(self, parts: float = 1.0) -> None:
        """Count parts that are done."""
        self.reach(self.done + parts)

    def reach(self, done: float) -> None:
        """Set the number of parts that are done."""
        self.done, self._moment = done, self._clock()
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=done)

    def end(self, line: str, file: TextIO | None = None, *, parts: float = 1.0) -> None:
        """Count parts that are done and print a line about them, in a log with the time left."""
        self.advance(parts)
        left = "" if self._bar else self.time_left()
        print_line(f"{line} ({left})" if left else line, file)

    def time_left(self) -> str:
        """Return the estimated time left in words; empty if it is unknown, or all is done."""
        if not self._first < self.done < self.total:
            return ""
        seconds = (self._moment - self._began) * (self.total - self.done) / (self.done - self._first)
        return in_words(max(0.0, seconds - (self._clock() - self._moment)))


def in_words(seconds: float) -> str:
    """Return the time left in words, rounded to the accuracy of such an estimate."""
    if seconds < 45:
        return "less than a minute left"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"about {minutes} minute{'s' if minutes > 1 else ''} left"
    return f"about {round(minutes / 60)} hours left"


def _bar(time_left: Callable[[], str]) -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.table import Column
    from rich.text import Text

    class TimeLeft(ProgressColumn):
        """The time left, without a line break."""

        def render(self, task: Task) -> Text:
            return Text(time_left(), no_wrap=True)

    return Progress(
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
        BarColumn(_BAR_WIDTH, table_column=Column(min_width=_BAR_WIDTH)),
        TimeLeft(table_column=Column(no_wrap=True)),
        console=Console(stderr=True, soft_wrap=True),
        transient=True,
        expand=True,
        redirect_stdout=sys.stdout.isatty(),
    )
