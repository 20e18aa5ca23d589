"""Files of data sets on disk: checksums, one writer at a time, and clear errors."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from allstep.common.base.errors import UserError
from allstep.common.config.data_config import DataConfig
from allstep.common.files.disk import NO_LOCKS, sha256_of
from allstep.common.files.regular_file import read_regular, regular

SUMS_NAME = "SHA256SUMS"
_MAX_SUMS_BYTES = 2**20


def read_sums(path: Path) -> dict[str, str]:
    """SHA-256 by file name, from a file as sha256sum writes it; lines of another form count for nothing."""
    lines = read_regular(path, maximum=_MAX_SUMS_BYTES).decode(errors="replace").splitlines()
    fields = [line.split(maxsplit=1) for line in lines]
    return {os.path.basename(pair[1].lstrip("*")): pair[0].lower() for pair in fields if len(pair) == 2}


def has_sum(path: Path, sha256: str) -> bool:
    """Whether there is a file at `path` with this SHA-256."""
    return path.exists() and sha256_of(path) == sha256


@contextmanager
def data_dir_errors(path: Path) -> Iterator[None]:
    """Turns an error of the disk (full, read-only, forbidden) into a line that names the file, or `path`."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise UserError(
            f"expected files of the data set that can be used, received {where}: {error.strerror}; mend that or choose "
            "another --dataset or --data-dir"
        ) from error


@contextmanager
def one_at_a_time(directory: Path) -> Iterator[None]:
    """Lets one process after the other into the block, of all those that share `directory`, on any host.

    Without it hosts with a common file system would download side by side, and replace files under the
    eyes of others that have just begun to read them. The lock goes when its holder ends, however it ends.
    """
    with open(directory / ".lock", "a", opener=regular) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:  # where there are none, each host has partial files of its own
                raise
        yield


def derived_file(paths: Sequence[Path], config: DataConfig, suffix: str) -> Path:
    """Where among the data sets to keep what was made of files once; another one after any of them has changed."""
    files = [(str(path.resolve()), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in paths]
    made_by = json.dumps([config.kind, config.input_fields, config.target_field, files])
    return config.data_dir / "derived" / f"{hashlib.sha256(made_by.encode()).hexdigest()[:24]}{suffix}"


def expect_derived(path: Path) -> None:
    """Refuse to go on without what one rank of each host has made.

    Raises:
        UserError: it is not there.
    """
    if not path.exists():
        raise UserError(
            f"expected {path}, received nothing: it is missing on this host; give all ranks of a host the same "
            "--data-dir"
        )
