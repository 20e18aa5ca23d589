"""Where each sample lies in files that hold many: built once a host, so that any sample is reached in any order.

A sample takes 16 bytes and its target: 10^6 samples of a class each take 24 MB, which the ranks of a host share.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from allstep.common.data.datasets.config import DataConfig
from allstep.common.data.datasets.files import derived_file, expect_derived, one_at_a_time
from allstep.common.files.disk import write_atomically
from allstep.common.files.regular_file import regular
from allstep.common.process.errors import UserError

_NUM_AT_ONCE = 2**16


@dataclass(frozen=True)
class Located:
    """A sample in a file."""

    offset: int
    """In bytes from the file's begin."""
    length: int
    """In bytes."""
    target: int | tuple[float, ...]
    """A class, or the numbers of a regression."""


@dataclass(frozen=True)
class SampleIndex:
    """The samples of a split, file by file in their order."""

    paths: Sequence[Path]
    records: np.ndarray
    """Of each sample `file`, `offset`, `length` and `target`; mapped."""

    @property
    def targets(self) -> np.ndarray:
        """int64 (samples,) or float32 (samples, numbers)."""
        return self.records["target"]

    def content(self, index: int) -> bytes:
        """The bytes of a sample, in no way checked.

        Raises:
            OSError: the file cannot be read, or has become shorter.
        """
        file, offset, length, _ = self.records[index].item()
        # Opened for each: a data set of thousands of files would take more descriptors than there are.
        with open(self.paths[file], "rb", buffering=0, opener=regular) as stream:
            data = os.pread(stream.fileno(), length, offset)
        if len(data) < length:
            raise OSError(None, f"expected {length} bytes at {offset}, received {len(data)}", str(self.paths[file]))
        return data

    def name(self, index: int) -> str:
        """The file and the place in it, for messages."""
        file, offset, _, _ = self.records[index].item()
        return f"{self.paths[file]}, byte {offset}"


def build_index(paths: Sequence[Path], scan: Callable[[Path], Iterator[Located]], config: DataConfig) -> None:
    """Build the index of files, unless it is there: another set, size or date of files has another one.

    Args:
        scan: finds the samples of a file.

    Raises:
        UserError: what `scan` raises; or some samples have another kind of target than the first one.
        OSError: the folder of data sets cannot be written.
    """
    target = derived_file(paths, config, ".npy")
    target.parent.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(target.parent):
        if not target.exists():
            records = np.concatenate(list(_blocks(paths, scan)))
            with write_atomically(target) as stream:
                np.save(stream, records, allow_pickle=False)


def open_index(paths: Sequence[Path], config: DataConfig) -> SampleIndex:
    """The index that `build_index` has written.

    Raises:
        UserError: it has not.
    """
    target = derived_file(paths, config, ".npy")
    expect_derived(target)
    return SampleIndex(paths, np.load(target, mmap_mode="r", allow_pickle=False))


def _blocks(paths: Sequence[Path], scan: Callable[[Path], Iterator[Located]]) -> Iterator[np.ndarray]:
    kind: tuple[type, int] | None = None
    rows: list[tuple] = []
    for number, path in enumerate(paths):
        for sample in scan(path):
            found = (int, 1) if isinstance(sample.target, int) else (float, len(sample.target))
            kind = kind or found
            if found != kind:
                raise UserError(
                    f"expected targets of one kind in all samples, received another one in {path}, byte "
                    f"{sample.offset}: {sample.target}; make them alike"
                )
            rows.append((number, sample.offset, sample.length, sample.target))
            if len(rows) == _NUM_AT_ONCE:
                yield np.array(rows, _record_type(kind))
                rows = []
    if kind is None:
        raise UserError(f"expected samples in {paths[0].parent}, received files without any; name other ones")
    yield np.array(rows, _record_type(kind))


def _record_type(kind: tuple[type, int]) -> np.dtype:
    target = ("target", "<i8") if kind[0] is int else ("target", "<f4", (kind[1],))
    return np.dtype([("file", "<u4"), ("offset", "<u8"), ("length", "<u4"), target])
