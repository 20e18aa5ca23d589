"""Files and folders on disk: atomic and tried writes, checksums, and folders that allstep wrote and may remove."""

import errno
import hashlib
import itertools
import os
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
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


def unused(path: Path) -> Path:
    """Return PATH-1, or the first of PATH-2, PATH-3, ... that does not exist, not as a broken link either."""
    names = (path.with_name(f"{path.name}-{number}") for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def try_folder(path: Path) -> None:
    """Write a temporary file in the folder `path`, or in the nearest existing folder above it.

    Checking permission bits is not enough: they do not restrict root, and do not show that a file system is read-only.
    Raises OSError, whose `strerror` is the reason, if the folder cannot be written.
    """
    folder = path.absolute()
    while not _is_there(folder):
        folder = folder.parent
    with tempfile.TemporaryDirectory(dir=folder, prefix=".allstep-"):
        pass


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def named_by_user(path: Path) -> Path:
    """Return the file that a path on a command line names: writing it leaves a link, as programs do that open it.

    Paths inside of a run's folder are not followed, since it may be a stranger's, with links to the user's files.
    """
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def try_file(path: Path) -> None:
    """Try to write in the folder of the file `path`; refuse a path such as /dev/null, which must not be replaced.

    Raises OSError, whose `strerror` is the reason, if the path cannot be written.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "Something else than a file is there", os.fspath(path))
    try_folder(path.parent)


IsOwn = Callable[[str], object]
"""Function that tells whether allstep writes files of a name into a kind of folder."""


def foreign_entries(folder: Path, is_own: IsOwn) -> list[str]:
    """Return the names in a folder that allstep did not write; the folder's own name if it is a link or no folder."""
    if not stat.S_ISDIR(folder.lstat().st_mode):
        return [folder.name]
    with os.scandir(folder) as entries:
        return sorted(
            entry.name for entry in entries if not (is_own(entry.name) and entry.is_file(follow_symlinks=False))
        )


def discard(folder: Path, is_own: IsOwn) -> None:
    """Remove a folder that holds nothing foreign; any other belongs to the user, whatever its name is.

    Raises OSError if it holds something else, or cannot be removed.
    """
    if foreign := foreign_entries(folder, is_own):
        raise FileExistsError(f"{folder} holds {foreign[0]!a}, which allstep did not write")
    for name in os.listdir(folder):
        (folder / name).unlink()
    folder.rmdir()
