"""Processes that decode images, as more than a few threads hinder each other.

Python's lock is held while an image is resized and copied: on 16 cores, 16 threads decoded 2,064 images a second, and
processes fed a training with 3,828 (docs/measurements/input.md).
"""

from __future__ import annotations

import math
import mmap
import queue
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from allstep.common.data.worker_processes import WorkerProcesses

if TYPE_CHECKING:
    from allstep.common.data.images.encoded import EncodedSplit

CHUNK = 8
"""Images that a process decodes at a time."""


class DecodeProcesses:
    """Decodes images of some splits in `number` processes, which write pixels into memory that all of them share."""

    def __init__(self, splits: Sequence[EncodedSplit], number: int) -> None:
        self._splits = splits
        shape = (number, CHUNK, splits[0].size, splits[0].size, 3)
        self._pixels = np.frombuffer(mmap.mmap(-1, math.prod(shape)), np.uint8).reshape(shape)
        self._free = queue.SimpleQueue()
        for place in range(number):
            self._free.put(place)
        self._processes = WorkerProcesses(self, number, "images", "--decode-threads")

    def read(self, split: EncodedSplit, indices: list[int], draws: list[list[float]], images: np.ndarray) -> None:
        """Write the pixels of samples into `images`, uint8 (n, size, size, 3), as `EncodedSplit.read_one` does.

        Raises its exceptions; Fault if a process is gone.
        """
        which = next(number for number, one in enumerate(self._splits) if one is split)

        def read(begin: int) -> None:
            part = slice(begin, begin + CHUNK)
            place = self._free.get()
            try:
                split.unreadable |= self._processes.call(self.decode, place, which, indices[part], draws[part])
                images[part] = self._pixels[place, : len(indices[part])]
            finally:
                self._free.put(place)

        for _ in split.pool.map(read, range(0, len(indices), CHUNK)):
            pass  # re-raises exceptions

    def decode(self, place: int, which: int, indices: list[int], draws: list[list[float]]) -> set[int]:
        """Decode samples in one of the processes; return those that it has found to be unreadable."""
        split = self._splits[which]
        for index, its_draws, out in zip(indices, draws, self._pixels[place], strict=False):
            split.read_one(index, its_draws, out)
        return split.unreadable
