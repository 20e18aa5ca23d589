"""Reporting in a background thread, e.g. over a network, so that training neither waits for it nor fails with it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from allstep.common.base.errors import UserError, summary
from allstep.common.base.terminal import warn
from allstep.common.reporting.base import Reporter

MAX_SECONDS_AT_END = 30.0


class Background(Reporter):
    """Reporter that opens another one in a background thread, and passes events on to it in order.

    If the other reporter fails, a warning is printed once, it gets no more events, and the run continues.
    """

    def __init__(self, flag: str, open_reporter: Callable[[], Reporter]) -> None:
        """Open the reporter that `flag` selects and wait until it is ready. Raises UserError if it cannot be opened."""
        self._flag = flag
        self._calls: queue.SimpleQueue[Callable[[Reporter], None] | None] = queue.SimpleQueue()
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(open_reporter, opened), name=flag, daemon=True)
        self._thread.start()
        try:
            opened.result()
        except Exception as error:
            raise UserError(
                f"expected a run to begin with {flag}, received {summary(error)}; correct its environment variables, "
                f"or leave out {flag}"
            ) from error

    def event(self, name: str, **fields: Any) -> None:
        self._calls.put(lambda reporter: reporter.event(name, **fields))

    def close(self) -> None:
        """Wait until all events have been passed on, for at most `MAX_SECONDS_AT_END`."""
        self._calls.put(lambda reporter: reporter.close())
        self._calls.put(None)
        self._thread.join(MAX_SECONDS_AT_END)
        if self._thread.is_alive():
            self._warn(f"not everything was taken within {MAX_SECONDS_AT_END:g} s; the rest is lost")

    def _run(self, open_reporter: Callable[[], Reporter], opened: Future[None]) -> None:
        try:
            reporter = open_reporter()
        except BaseException as error:  # the thread of __init__ waits for any end of this one
            opened.set_exception(error if isinstance(error, Exception) else RuntimeError(summary(error)))
            return
        opened.set_result(None)
        try:
            while call := self._calls.get():
                call(reporter)
        except Exception as error:
            self._warn(f"{summary(error)}; the run goes on, and reports no more there")

    def _warn(self, message: str) -> None:
        warn(f"{self._flag}: {message}")
