"""Files on disk: written whole or not at all, their checksum, and file systems without locks."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from allstep.common.files.regular_file import regular

# What flock answers where the file system has none: NFS without a lock daemon, Lustre without -o flock, ...
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL}


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(2**20))
    with open(path, "rb", buffering=0, opener=regular) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


@contextmanager
def write_atomically(path: Path) -> Iterator[BinaryIO]:
    """A stream whose content appears as `path` when the block ends, whole; if it raises, `path` stays as it was.

    For one process of a host at a time.
    """
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.partial")
    try:
        with open(temporary, "wb", opener=regular) as stream:
            yield stream
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
