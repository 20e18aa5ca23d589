"""Processes that read samples, as the workers of PyTorch's DataLoader do (num_workers).

They are forks, made before a sample is read, so that each opens files of its own.
"""

from __future__ import annotations

import math
import mmap
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from allstep.common.base.errors import Fault
from allstep.common.launch.spawn import NOTICES

if TYPE_CHECKING:
    from allstep.common.data.images.encoded import EncodedSplit


_reader: Any = None
"""Copy of the object that reads, in a process of `WorkerProcesses`."""


class WorkerProcesses:
    """Calls methods of copies of an object, one in each of `number` processes, which end with this process."""

    def __init__(self, reader: Any, number: int, where: str, flag: str) -> None:
        """`where` and `flag`, the flag that gives the number, are for the error message."""
        self.number, self._where, self._flag = number, where, flag
        context = multiprocessing.get_context("fork")
        self._pool = ProcessPoolExecutor(number, context, initializer=_begin, initargs=(reader, os.getpid()))
        with self._explained():
            self._pool.submit(os.getpid).result()  # the first call makes all of them

    def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a method of one of the copies returns. Raises its exceptions; Fault if a process is gone."""
        with self._explained():
            return self._pool.submit(_call, method.__name__, arguments).result()

    def split(self, method: Callable[..., list[Any]], numbers: Sequence[int], *arguments: Any) -> list[Any]:
        """Return the joined lists that a method returns for parts of `numbers`, in their order; raises as `call`."""
        parts = [part.tolist() for part in np.array_split(np.asarray(numbers, np.int64), self.number) if len(part)]
        with self._explained():
            results = [self._pool.submit(_call, method.__name__, (part, *arguments)) for part in parts]
            return [one for result in results for one in result.result()]

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except BrokenProcessPool:
            for process in list(self._pool._processes.values()):
                process.kill()  # the pool sends SIGTERM, and waits
            raise Fault(
                f"a process that reads {self._where} has ended: killed, perhaps for lack of memory, or by an error of "
                f"the library that it reads with; lower {self._flag}"
            ) from None


def _begin(reader: Any, parent: int) -> None:
    """Prepare a process: it has one thread, as a worker of PyTorch, and leaves signals to the rank it ends with."""
    global _reader
    _reader = reader
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in NOTICES:  # schedulers send them to all processes of a job, and the rank still needs samples
        signal.signal(number, lambda *_: None)  # programs that the reader starts would inherit SIG_IGN
        signal.siginterrupt(number, False)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(0)


def _call(method: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(_reader, method)(*arguments)


CHUNK = 8
"""Images that a process decodes at a time."""


class DecodeProcesses:
    """Decodes images of some splits in `number` processes, which write pixels into memory that all of them share."""

    def __init__(self, splits: Sequence[EncodedSplit], number: int) -> None:
        self._splits = splits
        shape = (number, CHUNK, splits[0].size, splits[0].size, 3)
        self._pixels = np.frombuffer(mmap.mmap(-1, math.prod(shape)), np.uint8).reshape(shape)
        self._free = queue.SimpleQueue()
        for block in range(number):
            self._free.put(block)
        self._processes = WorkerProcesses(self, number, "images", "--decode-threads")

    def read(self, split: EncodedSplit, indices: list[int], draws: list[list[float]], images: np.ndarray) -> None:
        """Write the pixels of samples into `images`, uint8 (n, size, size, 3), as `EncodedSplit.read_one` does.

        Raises its exceptions; Fault if a process is gone.
        """
        which = next(number for number, one in enumerate(self._splits) if one is split)

        def read(begin: int) -> None:
            part = slice(begin, begin + CHUNK)
            block = self._free.get()
            try:
                split.unreadable |= self._processes.call(self.decode, block, which, indices[part], draws[part])
                images[part] = self._pixels[block, : len(indices[part])]
            finally:
                self._free.put(block)

        for _ in split.pool.map(read, range(0, len(indices), CHUNK)):
            pass  # re-raises exceptions

    def decode(self, block: int, which: int, indices: list[int], draws: list[list[float]]) -> set[int]:
        """Decode samples in one of the processes, into a block of the pixels; return the indices of unreadable ones."""
        split = self._splits[which]
        for index, its_draws, out in zip(indices, draws, self._pixels[block], strict=False):
            split.read_one(index, its_draws, out)
        return split.unreadable
