"""Index of the samples in files that hold many, built once per host, for reading samples in any order.

A sample takes 20 bytes plus its target, and 16 more if it is tokens: 10^6 samples with a class take 28 MB, which the
ranks of a host share.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from allstep.common.base.errors import UserError, summary
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.files import derive_once, derived, derived_file
from allstep.common.data.passed_over import PassedOver
from allstep.common.files import strict_json
from allstep.common.files.disk import Unchanged, read_regular, regular, write_atomically
from allstep.common.files.strict_json import from_json, to_json

_NUM_AT_ONCE = 2**16
_MAX_COUNTS_BYTES = 2**16
_SUFFIX, _PASSED_SUFFIX = ".4.npy", ".4.passed-over.json"
"""Suffix of index files; its number changes with the layout of the records, so that older indexes are not used."""


@dataclass(frozen=True)
class Located:
    """Location of a sample in a file, and its target."""

    offset: int
    """Bytes from the start of the file."""
    length: int
    """Length in bytes."""
    target: int | tuple[float, ...] | str | None
    """Class by its number or name, a one-hot row or the numbers of a regression, or None for tokens, which are read
    together with the input."""
    token_range: tuple[int, int] | None = None
    """Smallest and largest token of input and target, if the input is tokens."""
    checksum: int = 0
    """32 bits that change with the content; 0 if the format has none."""


@dataclass(frozen=True)
class SampleIndex:
    """Samples of a split, file by file."""

    paths: Sequence[Path]
    files: Sequence[Unchanged]
    records: np.ndarray
    """Memory-mapped records with `file`, `offset`, `length`, `checksum` and, where samples have them, `target` and
    `token_range`."""

    @property
    def targets(self) -> np.ndarray | None:
        """Targets, int64 (samples,), float32 (samples, numbers) or str (samples,)."""
        targets = self._field("target")
        return targets if targets is None or targets.dtype.kind != "S" else np.char.decode(targets, "utf-8")

    @property
    def token_ranges(self) -> np.ndarray | None:
        """Smallest and largest token of each sample, int64 (samples, 2)."""
        return self._field("token_range")

    def content(self, index: int) -> bytes:
        """Return the bytes of a sample without checking them.

        Raises UserError if the file has changed; OSError if it cannot be read, or is shorter than its index says.
        """
        file, offset, length, *_ = self.records[index].item()
        # Opened for each read, since keeping thousands of files open could exceed the limit on descriptors.
        with open(self.paths[file], "rb", buffering=0, opener=regular) as stream:
            self.files[file].check(stream.fileno())
            data = os.pread(stream.fileno(), length, offset)
        if len(data) < length:
            raise OSError(None, f"expected {length} bytes at {offset}, received {len(data)}", str(self.paths[file]))
        return data

    def sizes(self, indices: np.ndarray) -> np.ndarray:
        return self.records["length"][indices]

    def checksums(self, indices: np.ndarray) -> np.ndarray:
        return self.records["checksum"][indices]

    def name(self, index: int) -> str:
        """Return file and offset of a sample for error messages."""
        file, offset, *_ = self.records[index].item()
        return f"{self.paths[file]}, byte {offset}"

    def _field(self, name: str) -> np.ndarray | None:
        return self.records[name] if name in (self.records.dtype.names or ()) else None


def build_index(
    paths: Sequence[Path], scan: Callable[[Path, PassedOver], Iterator[Located]], config: DataConfig
) -> PassedOver:
    """Build the index of files, unless there is one for files of the same paths, sizes and dates.

    `scan` finds the samples of a file, and counts what it passes over, which is returned, whether it was then or now.
    Raises UserError if `scan` does, or a sample is of another kind than the first one; OSError if the folder of data
    sets cannot be written.
    """
    counts = derived_file(paths, config, _PASSED_SUFFIX)

    def build(target: Path) -> None:
        passed = PassedOver()
        records = np.concatenate(list(_blocks(paths, lambda path: scan(path, passed))))
        with write_atomically(counts) as stream:
            stream.write(json.dumps(to_json(passed)).encode())
        with write_atomically(target) as stream:
            np.save(stream, records, allow_pickle=False)

    derive_once(derived_file(paths, config, _SUFFIX), build)
    try:
        return from_json(PassedOver, strict_json.loads(read_regular(counts, maximum=_MAX_COUNTS_BYTES)), "counts")
    except (OSError, ValueError) as error:
        raise UserError(
            f"expected counts of what was passed over in {counts}, received {summary(error)}; remove its folder"
        ) from error


def open_index(paths: Sequence[Path], config: DataConfig) -> SampleIndex:
    """Open the index that `build_index` has written. Raises UserError if there is no index of these files."""
    target = derived(derived_file(paths, config, _SUFFIX))
    return SampleIndex(paths, [Unchanged(path) for path in paths], np.load(target, mmap_mode="r", allow_pickle=False))


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
            label = sample.target.encode() if isinstance(sample.target, str) else sample.target
            optional = (one for one in (label, sample.token_range) if one is not None)
            rows.append((number, sample.offset, sample.length, sample.checksum, *optional))
            if len(rows) == _NUM_AT_ONCE:
                yield np.array(rows, _record_type(first, rows))
                rows = []
    if first is None:
        raise UserError(f"expected samples in {paths[0].parent}, received files without any; name other ones")
    yield np.array(rows, _record_type(first, rows))


def _kind(sample: Located) -> str:
    if sample.target is None:
        return "tokens, and those that follow"
    if isinstance(sample.target, tuple):
        target = f"{len(sample.target)} fraction(s)"
    else:
        target = "a class" if isinstance(sample.target, int) else "a class's name"
    return f"{'tokens' if sample.token_range else 'an input'} and {target}"


def _record_type(sample: Located, rows: Sequence[tuple]) -> np.dtype:
    fields: list[tuple] = [("file", "<u4"), ("offset", "<u8"), ("length", "<u4"), ("checksum", "<u4")]
    if isinstance(sample.target, int):
        fields.append(("target", "<i8"))
    elif isinstance(sample.target, str):
        fields.append(("target", f"S{max((len(row[4]) for row in rows), default=1)}"))
    elif sample.target is not None:
        fields.append(("target", "<f4", (len(sample.target),)))
    if sample.token_range:
        fields.append(("token_range", "<i8", (2,)))
    return np.dtype(fields)
