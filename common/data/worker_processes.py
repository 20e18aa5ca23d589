"""Processes that read samples, as the workers of PyTorch's DataLoader do (num_workers).

They are forks, made before a sample is read, so that each opens files of its own.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

import numpy as np

from allstep.common.base.errors import Fault

_reader: Any = None
"""Copy of the object that reads, in a process of `WorkerProcesses`."""


class WorkerProcesses:
    """Calls methods of copies of an object, one in each of `number` processes, which end with this one."""

    def __init__(self, reader: Any, number: int, where: str, flag: str) -> None:
        """`flag` is the one that gives their number."""
        self.number, self._where, self._flag = number, where, flag
        context = multiprocessing.get_context("fork")
        self._pool = ProcessPoolExecutor(number, context, initializer=_begin, initargs=(reader, os.getpid()))
        with self._told():
            self._pool.submit(os.getpid).result()  # the first call makes all of them

    def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a method of one of the copies returns. Raises its exceptions; Fault if a process is gone."""
        with self._told():
            return self._pool.submit(_call, method.__name__, arguments).result()

    def split(self, method: Callable[..., list[Any]], numbers: Sequence[int], *arguments: Any) -> list[Any]:
        """Return the joined lists that a method returns for parts of `numbers`, in their order; raises as `call`."""
        parts = [part.tolist() for part in np.array_split(np.asarray(numbers, np.int64), self.number) if len(part)]
        with self._told():
            results = [self._pool.submit(_call, method.__name__, (part, *arguments)) for part in parts]
            return [one for result in results for one in result.result()]

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except BrokenProcessPool:
            raise Fault(
                f"a process that reads {self._where} has ended: killed, perhaps for lack of memory, or by an error of "
                f"the library that it reads with; lower {self._flag}"
            ) from None


def _begin(reader: Any, parent: int) -> None:
    """Prepare a process: it has one thread, as a worker of PyTorch, and leaves Ctrl-C to the rank that it ends with."""
    global _reader
    _reader = reader
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(0)


def _call(method: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(_reader, method)(*arguments)
