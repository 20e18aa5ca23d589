"""Cache of a data set's arrays: .npy files, unpacked once per host and memory-mapped by all its ranks."""

import gzip
import hashlib
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.base import ArraySplit, Dataset
from allstep.common.data.datasets.download import RemoteFile, expected_sums, fetch, print_checksum_source
from allstep.common.data.datasets.files import SUMS_NAME, derived, has_sum, one_at_a_time, read_sums
from allstep.common.files.disk import check_memory, regular, sha256_of, write_atomically
from allstep.common.files.npy import check_header

Arrays = Mapping[str, np.ndarray]
ARRAY_NAMES = ("train_images", "train_labels", "validation_images", "validation_labels")
"""uint8 (samples, height, width, channels) for images, int64 (samples,) for labels."""


def prepare_arrays(
    config: DataConfig, files: Sequence[RemoteFile], mirrors: Sequence[str], unpack: Callable[[Path], Arrays]
) -> None:
    """Download the files of a data set, and write the arrays that `unpack` makes of their folder, unless they exist.

    Raises UserError if a file is unavailable or has the wrong content; OSError if the folder cannot be read or written.
    """
    directory = config.data_dir / config.dataset
    sums = fetch(files, directory, mirrors=[config.mirror] if config.mirror else mirrors)
    target = _target(directory, sums)
    if not _is_intact(target):
        with one_at_a_time(directory):
            if not _is_intact(target):  # Another process may have unpacked them while this one waited.
                try:
                    arrays = unpack(directory)
                except UserError as error:  # only the user's own files can be wrong, since published ones are checked
                    raise UserError(f"{error}; put the right file there and write {SUMS_NAME} again") from error
                _write(target, arrays)
    print_checksum_source(directory)


def load_arrays(
    config: DataConfig,
    files: Sequence[RemoteFile],
    *,
    image_shape: tuple[int, int, int],
    num_classes: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Dataset:
    """Open the data set that `prepare_arrays` has written.

    Raises UserError if the arrays do not exist or have the wrong content, OSError if they cannot be read.
    """
    directory = config.data_dir / config.dataset
    target = _target(directory, expected_sums(files, directory))
    derived(target / SUMS_NAME)
    splits = []
    for split in ("train", "validation"):
        images = _mapped(target / f"{split}_images.npy", np.uint8, image_shape)
        labels = _mapped(target / f"{split}_labels.npy", np.int64, ())
        if len(images) != len(labels) or not 0 <= labels.min() <= labels.max() < num_classes:
            raise UserError(
                f"expected {len(images)} labels from 0 to {num_classes - 1} in {target / split}_labels.npy, received "
                f"{len(labels)} from {labels.min()} to {labels.max()}; remove {target}"
            )
        splits.append(ArraySplit(images, labels))
    return Dataset(*splits, input_shape=image_shape, num_classes=num_classes, mean=mean, std=std)


def _mapped(path: Path, dtype: type, item_shape: tuple[int, ...]) -> np.ndarray:
    """Map the array in a file of `_save` into memory."""
    with open(path, "rb", opener=regular) as stream:
        try:
            check_header(stream, os.fstat(stream.fileno()).st_size)
            mapped = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError):
            mapped = np.empty(0)
    expected = np.dtype(dtype), 1 + len(item_shape), item_shape
    if (mapped.dtype, mapped.ndim, mapped.shape[1:]) != expected or not mapped.size:
        raise UserError(
            f"expected {np.dtype(dtype)} numbers of shape {('n', *item_shape)} in {path}, received something else; "
            f"remove {path.parent}"
        )
    return mapped.view(np.ndarray)  # since indexing np.memmap itself costs several microseconds more


MAX_CONTENT_BYTES = 600_000_000
"""Limit on the unpacked size of one file: CIFAR-10 has 184 MB, EMNIST's largest part in MNIST's format 547 MB."""


def check_content_size(path: Path, num_bytes: int) -> None:
    """Check the content size that a header declares, before reading that much.

    Raises UserError if it exceeds `MAX_CONTENT_BYTES`, OSError if it exceeds the available memory.
    """
    if num_bytes > MAX_CONTENT_BYTES:
        raise UserError(f"expected at most {MAX_CONTENT_BYTES} bytes of content in {path}, received {num_bytes}")
    check_memory(path, 3 * num_bytes)  # bytes, an array of them, and a transposed copy


class Bounded:
    """Stream that raises an error once an archive has unpacked to more than `MAX_CONTENT_BYTES`."""

    def __init__(self, path: Path, stream: IO[bytes] | gzip.GzipFile) -> None:
        self._path, self._stream, self._num_bytes = path, stream, 0

    def read(self, size: int) -> bytes:
        """Read at most `size` bytes. Raises UserError after more than `MAX_CONTENT_BYTES` in total."""
        data = self._stream.read(size)
        self._num_bytes += len(data)
        if self._num_bytes > MAX_CONTENT_BYTES:
            raise UserError(f"expected at most {MAX_CONTENT_BYTES} bytes of content in {self._path}, received more")
        return data


@contextmanager
def archive_errors(path: Path) -> Iterator[None]:
    """Turn the standard library's errors about a damaged .gz or .tar.gz into a UserError that names `path`."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError) as error:
        raise UserError(f"expected {path} to be whole, received one that is damaged or cut short: {error}") from error


def _target(directory: Path, sums: Mapping[str, str]) -> Path:
    # Named after the files' content, so that arrays made of earlier files are never used for changed ones.
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
    """Write as np.save does, but raise an OSError on a full disk; np.save says "470400 requested and 61440 written"."""
    array = np.ascontiguousarray(array)
    np.lib.format.write_array_header_1_0(stream, np.lib.format.header_data_from_array_1_0(array))
    stream.write(array.data)


def _is_intact(target: Path) -> bool:
    if not (target / SUMS_NAME).exists():
        return False
    sums = read_sums(target / SUMS_NAME)
    return all(has_sum(target / f"{name}.npy", sums.get(f"{name}.npy", "")) for name in ARRAY_NAMES)
