"""Where each sample lies in files that hold many: built once a host, so that any sample is reached in any order.

A sample takes 16 bytes and its target: 10^6 samples of a class each take 24 MB, which the ranks of a host share. One of
tokens takes 16 more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.files import derived_file, expect_derived, one_at_a_time
from allstep.common.files.disk import write_atomically
from allstep.common.files.regular_file import regular

_NUM_AT_ONCE = 2**16
_SUFFIX = ".2.npy"
"""Has a number of its own for each layout of the records, so that an older index is not taken for one."""


@dataclass(frozen=True)
class Located:
    """A sample in a file."""

    offset: int
    """In bytes from the file's begin."""
    length: int
    """In bytes."""
    target: int | tuple[float, ...] | None
    """A class, the numbers of a regression, or None: tokens, as many as in the input, which are read with it."""
    token_range: tuple[int, int] | None = None
    """The least and the largest token, where the input is tokens; those of the target count as well."""


@dataclass(frozen=True)
class SampleIndex:
    """The samples of a split, file by file in their order."""

    paths: Sequence[Path]
    records: np.ndarray
    """Of each sample `file`, `offset` and `length`, `target` and `token_range` where it has them; mapped."""

    @property
    def targets(self) -> np.ndarray | None:
        """int64 (samples,) or float32 (samples, numbers)."""
        return self._field("target")

    @property
    def token_ranges(self) -> np.ndarray | None:
        """int64 (samples, 2)."""
        return self._field("token_range")

    def content(self, index: int) -> bytes:
        """The bytes of a sample, in no way checked.

        Raises:
            OSError: the file cannot be read, or has become shorter.
        """
        file, offset, length, *_ = self.records[index].item()
        # Opened for each: a data set of thousands of files would take more descriptors than there are.
        with open(self.paths[file], "rb", buffering=0, opener=regular) as stream:
            data = os.pread(stream.fileno(), length, offset)
        if len(data) < length:
            raise OSError(None, f"expected {length} bytes at {offset}, received {len(data)}", str(self.paths[file]))
        return data

    def name(self, index: int) -> str:
        """The file and the place in it, for messages."""
        file, offset, *_ = self.records[index].item()
        return f"{self.paths[file]}, byte {offset}"

    def _field(self, name: str) -> np.ndarray | None:
        return self.records[name] if name in (self.records.dtype.names or ()) else None


def build_index(paths: Sequence[Path], scan: Callable[[Path], Iterator[Located]], config: DataConfig) -> None:
    """Build the index of files, unless it is there: another set, size or date of files has another one.

    Args:
        scan: finds the samples of a file.

    Raises:
        UserError: what `scan` raises; or some samples are of another kind than the first one.
        OSError: the folder of data sets cannot be written.
    """
    target = derived_file(paths, config, _SUFFIX)
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
    target = derived_file(paths, config, _SUFFIX)
    expect_derived(target)
    return SampleIndex(paths, np.load(target, mmap_mode="r", allow_pickle=False))


def _blocks(paths: Sequence[Path], scan: Callable[[Path], Iterator[Located]]) -> Iterator[np.ndarray]:
    first: Located | None = None
    rows: list[tuple] = []
    for number, path in enumerate(paths):
        for sample in scan(path):
            first = first or sample
            if _kind(sample) != _kind(first):
                raise UserError(
                    f"expected samples of one kind ({_kind(first)}), received another one in {path}, byte "
                    f"{sample.offset}: {_kind(sample)}; make them alike"
                )
            optional = (one for one in (sample.target, sample.token_range) if one is not None)
            rows.append((number, sample.offset, sample.length, *optional))
            if len(rows) == _NUM_AT_ONCE:
                yield np.array(rows, _record_type(first))
                rows = []
    if first is None:
        raise UserError(f"expected samples in {paths[0].parent}, received files without any; name other ones")
    yield np.array(rows, _record_type(first))


def _kind(sample: Located) -> str:
    if sample.target is None:
        return "tokens, and those that follow"
    target = "a class" if isinstance(sample.target, int) else f"{len(sample.target)} fraction(s)"
    return f"{'tokens' if sample.token_range else 'an input'} and {target}"


def _record_type(sample: Located) -> np.dtype:
    fields: list[tuple] = [("file", "<u4"), ("offset", "<u8"), ("length", "<u4")]
    if isinstance(sample.target, int):
        fields.append(("target", "<i8"))
    elif sample.target is not None:
        fields.append(("target", "<f4", (len(sample.target),)))
    if sample.token_range:
        fields.append(("token_range", "<i8", (2,)))
    return np.dtype(fields)
