"""Files of data sets on disk: checksums, locks for writers, clear errors, and files that are unpacked once per host."""

import bz2
import dataclasses
import fcntl
import gzip
import hashlib
import json
import lzma
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from allstep.common.base.errors import UserError, summary
from allstep.common.config.data_config import DataConfig
from allstep.common.files.disk import NO_LOCKS, read_regular, regular, sha256_of, write_atomically

SUMS_NAME = "SHA256SUMS"
_MAX_SUMS_BYTES = 2**20


def read_sums(path: Path) -> dict[str, str]:
    """Read SHA-256 sums by file name from the output of sha256sum; other lines are ignored."""
    lines = read_regular(path, maximum=_MAX_SUMS_BYTES).decode(errors="replace").splitlines()
    fields = [line.split(maxsplit=1) for line in lines]
    return {os.path.basename(pair[1].lstrip("*")): pair[0].lower() for pair in fields if len(pair) == 2}


def has_sum(path: Path, sha256: str) -> bool:
    """Return whether there is a file at `path` with this SHA-256."""
    return path.exists() and sha256_of(path) == sha256


@contextmanager
def data_dir_errors(path: Path) -> Iterator[None]:
    """Turn an error of the disk (full, read-only, forbidden) into a UserError that names the file, or `path`."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise UserError(
            f"expected files of the data set that can be used, received {where}: {error.strerror}; fix that or choose "
            "another --dataset or --data-dir"
        ) from error


@contextmanager
def one_at_a_time(directory: Path) -> Iterator[None]:
    """Let only one process at a time into the block, among all that share `directory`, on any host.

    Otherwise hosts with a common file system would download at the same time, and replace files that other
    hosts have begun to read. The lock is released when its holder exits, even if it is killed.
    """
    with open(directory / ".lock", "a", opener=regular) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:  # without locks this still works, as each host has its own partial files
                raise
        yield


def derived_file(paths: Sequence[Path], config: DataConfig, suffix: str) -> Path:
    """Return a path below the data folder for a file derived from others; it differs after any of them has changed."""
    files = [(str(path.resolve()), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in paths]
    made_by = json.dumps([config.kind, config.input_fields, config.target_field, files])
    return config.data_dir / "derived" / f"{hashlib.sha256(made_by.encode()).hexdigest()[:24]}{suffix}"


def derive_once(target: Path, make: Callable[[Path], None]) -> None:
    """Have `make` write a file, unless another run has done so."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(target.parent):
        if not target.exists():
            make(target)


def derived(path: Path) -> Path:
    """Return a path. Raises UserError if the file, which one rank of each host derives, does not exist."""
    if not path.exists():
        raise UserError(
            f"expected {path}, received nothing: it is missing on this host; give all ranks of a host the same "
            "--data-dir"
        )
    return path


_OPENERS = {b"\x1f\x8b\x08": gzip.open, b"BZh": bz2.open, b"\xfd7z": lzma.open}
_ENDINGS = (".gz", ".bz2", ".xz")


def with_packed(*suffixes: str) -> tuple[str, ...]:
    """Return suffixes of files, and those of the same files when they are compressed."""
    return (*suffixes, *(suffix + ending for suffix in suffixes for ending in _ENDINGS))


def unpack_once(path: Path, config: DataConfig) -> None:
    """Unpack a file if it is compressed, unless another run has done so. Raises UserError if the file is damaged."""
    with open(path, "rb", opener=regular) as stream:
        opener = _OPENERS.get(stream.read(3))
        if opener is None:
            return
        stream.seek(0)

        def unpack(target: Path) -> None:
            with opener(stream) as source, write_atomically(target) as plain:
                shutil.copyfileobj(source, plain, 2**20)

        try:
            derive_once(_target(path, config), unpack)
        except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError, ValueError) as error:
            raise UserError(
                f"expected a whole file in {path}, received a damaged one ({summary(error)}); write it again"
            ) from error


def unpacked(path: Path, config: DataConfig) -> Path:
    """Return the path itself, or that of the file that `unpack_once` has written.

    Raises UserError if the unpacked file is missing.
    """
    with open(path, "rb", opener=regular) as stream:
        if stream.read(3) not in _OPENERS:
            return path
    return derived(_target(path, config))


def _target(path: Path, config: DataConfig) -> Path:
    return derived_file([path], dataclasses.replace(config, input_fields=(), target_field=None), ".unpacked")
