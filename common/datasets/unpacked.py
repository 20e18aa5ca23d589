"""A data set's arrays, unpacked once a host into .npy files that all its ranks map into memory and share."""

from __future__ import annotations

import gzip
import hashlib
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from allstep.common.datasets.base import ArraySplit
from allstep.common.datasets.files import (
    SUMS_NAME,
    has_sum,
    one_at_a_time,
    read_sums,
    sha256_of,
    write_atomically,
)
from allstep.common.errors import UserError

Arrays = Mapping[str, np.ndarray]
ARRAY_NAMES = ("train_images", "train_labels", "validation_images", "validation_labels")
"""uint8 (samples, height, width, channels) for images, int64 (samples,) for labels."""


def unpack_once(directory: Path, sums: Mapping[str, str], unpack: Callable[[], Arrays]) -> None:
    """Writes the arrays that `unpack` makes of the files with these checksums, unless they are there intact.

    Raises:
        UserError: what `unpack` raises, and what to do.
        OSError: the folder cannot be read or written.
    """
    target = _target(directory, sums)
    if _is_intact(target):
        return
    with one_at_a_time(directory):
        if not _is_intact(target):  # Another process may have unpacked them while this one waited.
            try:
                arrays = unpack()
            except UserError as error:  # in files of the user's own: the published ones are right
                raise UserError(f"{error}; put the right file there and write {SUMS_NAME} anew") from error
            _write(target, arrays)


def open_splits(directory: Path, sums: Mapping[str, str]) -> tuple[ArraySplit, ArraySplit]:
    """The training and the validation split that `unpack_once` has written.

    Raises:
        UserError: it has not.
    """
    target = _target(directory, sums)
    if not (target / SUMS_NAME).exists():
        raise UserError(f"{target} is missing on this host: give all ranks of a host the same --data-dir")
    # As plain arrays: indexing np.memmap itself costs several microseconds more.
    arrays = [np.load(target / f"{name}.npy", mmap_mode="r").view(np.ndarray) for name in ARRAY_NAMES]
    return ArraySplit(arrays[0], arrays[1]), ArraySplit(arrays[2], arrays[3])


@contextmanager
def archive_errors(path: Path) -> Iterator[None]:
    """Turns what the standard library raises on a damaged .gz or .tar.gz into a line that names `path`."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError) as error:
        raise UserError(f"{path} is damaged or cut short: {error}") from error


def _target(directory: Path, sums: Mapping[str, str]) -> Path:
    # Named after the files' content, so that other files never meet arrays made of earlier ones.
    content = hashlib.sha256("".join(f"{name}={sums[name]};" for name in sorted(sums)).encode())
    return directory / f"unpacked-{content.hexdigest()[:12]}"


def _write(target: Path, arrays: Arrays) -> None:
    target.mkdir(exist_ok=True)
    paths = {name: target / f"{name}.npy" for name in ARRAY_NAMES}
    for name, path in paths.items():
        with write_atomically(path) as stream:
            _save(stream, arrays[name])
    with write_atomically(target / SUMS_NAME) as stream:
        stream.writelines(f"{sha256_of(path)}  {path.name}\n".encode() for path in paths.values())


def _save(stream: BinaryIO, array: np.ndarray) -> None:
    """As np.save does, whose error on a full disk ("470400 requested and 61440 written") does not say so."""
    array = np.ascontiguousarray(array)
    np.lib.format.write_array_header_1_0(stream, np.lib.format.header_data_from_array_1_0(array))
    stream.write(array.data)


def _is_intact(target: Path) -> bool:
    if not (target / SUMS_NAME).exists():
        return False
    sums = read_sums(target / SUMS_NAME)
    return all(has_sum(target / f"{name}.npy", sums.get(f"{name}.npy", "")) for name in ARRAY_NAMES)
