"""Files and folders on disk: safe reading, atomic and tried writes, checksums, and folders that allstep may remove.

Opening a FIFO blocks, reading a device may never end, and a file may be larger than memory. `regular` opens only
regular files, and checks the open descriptor, so the file cannot be exchanged after the check:

    with open(path, "rb", opener=regular) as stream:
        ...
    data = read_regular(path, maximum=2**20)

Both raise OSError, as `open` does; the message tells what was expected and what was received.
"""

import errno
import functools
import hashlib
import itertools
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from allstep.common.base.errors import UserError
from allstep.common.base.resources import available_memory, host_name

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
    temporary = path.with_name(f".{path.name}.{host_name()}.partial")
    try:
        with open(temporary, "wb", opener=regular) as stream:
            yield stream
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def unused(path: Path) -> Path:
    """Return the first of PATH-1, PATH-2, ... that does not exist, not even as a broken link."""
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
    """Return the file to replace for a path on the command line: the target of a link, which itself stays.

    Links inside a run's folder are not followed, since a folder from elsewhere may have links to the user's files.
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
    """Return the names in a folder that allstep did not write; the path's own name if it is a link or no folder."""
    if not stat.S_ISDIR(folder.lstat().st_mode):
        return [folder.name]
    with os.scandir(folder) as entries:
        return sorted(
            entry.name for entry in entries if not (is_own(entry.name) and entry.is_file(follow_symlinks=False))
        )


def is_expendable(folder: Path, is_own: IsOwn) -> bool:
    """Return whether allstep may remove a folder: it holds nothing foreign and is not write-protected."""
    return not foreign_entries(folder, is_own) and os.access(folder, os.W_OK)


def discard(folder: Path, is_own: IsOwn) -> None:
    """Remove a folder that allstep wrote. Raises OSError if it holds anything foreign, or cannot be removed."""
    if foreign := foreign_entries(folder, is_own):
        raise FileExistsError(f"{folder} holds {foreign[0]!a}, which allstep did not write")
    for name in os.listdir(folder):
        (folder / name).unlink()
    folder.rmdir()


_MIN_CHECKED_BYTES = 2**20
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
}


def regular(path: str | os.PathLike, flags: int) -> int:
    """Return a descriptor of a regular file, to read or to write, without blocking; an opener for `open`.

    Raises OSError if the path is not a regular file, or cannot be opened.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or writing to a FIFO without a reader
            raise _irregular(path, os.stat(path).st_mode) from None
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _irregular(path, mode)
    return descriptor


def read_regular(path: Path, *, maximum: int) -> bytes:
    """Return the content of a regular file of at most `maximum` bytes.

    Raises OSError if the file is too large, larger than the available memory, not a regular file, or cannot be read.
    """
    with open(path, "rb", opener=regular) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size <= maximum:
            check_memory(path, size)
            data = stream.read(size + 1)
            if len(data) > size:  # it has grown since, or is a file of /proc, which has no size
                while len(data) <= maximum and (more := stream.read(min(2**16, maximum + 1 - len(data)))):
                    data += more
            size = len(data)
    if size > maximum:
        raise OSError(errno.EFBIG, f"expected at most {maximum} bytes, received {size}", str(path))
    return data


def check_memory(path: Path | str, size: int) -> None:
    """Check that there is memory for `size` bytes of a file. Raises OSError if there is not."""
    if size > _MIN_CHECKED_BYTES and size > (left := available_memory()):
        reason = f"expected at most {left} bytes, the memory that is left, received {size}"
        raise OSError(errno.ENOMEM, reason, str(path))


class Unchanged:
    """File that must stay as it is while its samples are read."""

    def __init__(self, path: Path) -> None:
        self._path, self._first = path, os.stat(path)

    def check(self, descriptor: int | None = None) -> None:
        """Check the file that an open `descriptor` reads, or else the file that this process has mapped.

        Raises UserError if it has changed. A mapped file that was removed or replaced is intact in this process.
        """
        try:
            now = os.stat(self._path if descriptor is None else descriptor)
        except FileNotFoundError:
            return
        first = self._first
        is_mapped = descriptor is not None or now.st_ino == first.st_ino
        if is_mapped and (now.st_size, now.st_mtime_ns) != (first.st_size, first.st_mtime_ns):
            raise changed(self._path)


def changed(path: str | os.PathLike) -> UserError:
    """Return the error about a file that changed while it was read."""
    return UserError(f"{path} has changed during training; start again with files that stay as they are")


def _irregular(path: str | os.PathLike, mode: int) -> OSError:
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    return OSError(number, f"expected a regular file, received {kind}", os.fspath(path))


@functools.cache
def texts(folder: Path) -> dict[str, str]:
    """Return the texts in `folder` and the folders in it, by path in order, from FOLDER.xz if there is no folder.

    Raises UserError if Python was built without the library that reads this file.
    """
    if folder.is_dir():
        files = [file for file in sorted(folder.rglob("*.*")) if file.is_file()]
        return {file.relative_to(folder).as_posix(): file.read_bytes().decode() for file in files}
    try:
        import lzma
    except ImportError:
        raise UserError(f"{folder.name} needs a Python with lzma; build it where liblzma is installed") from None
    words = lzma.decompress(folder.with_suffix(".xz").read_bytes()).decode().split("\0")
    return dict(sorted(zip(words[::2], words[1::2], strict=True)))
