"""Files on disk: atomic writes, checksums, and errors of file systems without locks."""

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

# Errors of full disks, quotas and limits on files.
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Errors of flock on file systems without locks: NFS without a lock daemon, Lustre without -o flock, ...
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL}


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(2**20))
    with open(path, "rb", buffering=0, opener=regular) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


@contextmanager
def write_atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a stream whose content replaces `path` atomically when the block ends; if it raises, `path` is unchanged.

    Only one process per host may use it at a time.
    """
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.partial")
    try:
        with open(temporary, "wb", opener=regular) as stream:
            yield stream
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
