"""Files of data sets on disk: checksums, locks for writers, and clear errors."""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from allstep.common.base.errors import UserError
from allstep.common.config.data_config import DataConfig
from allstep.common.files.disk import NO_LOCKS, sha256_of
from allstep.common.files.regular_file import read_regular, regular

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
