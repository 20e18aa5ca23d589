"""Safe reading of files whose origin is unknown.

Opening a FIFO blocks, reading a device may never end, and a file may be larger than memory. `regular` opens only
regular files, and checks the open descriptor, so the file cannot be exchanged after the check:

    with open(path, "rb", opener=regular) as stream:
        ...
    data = read_regular(path, most=2**20)

Both raise OSError, as `open` does; the message tells what was expected and what was received.
"""

import errno
import os
import stat
from pathlib import Path

from allstep.common.base.errors import UserError
from allstep.common.base.resources import available_memory

_ALWAYS_THERE = 2**20  # bytes; fewer are not worth checking
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
    if size > _ALWAYS_THERE and size > (left := available_memory()):
        reason = f"expected at most {left} bytes, the memory that is left, received {size}"
        raise OSError(errno.ENOMEM, reason, str(path))


class Unchanged:
    """File that must stay as it is while its samples are read."""

    def __init__(self, path: Path) -> None:
        self._path, self._first = path, os.stat(path)

    def check(self, descriptor: int | None = None) -> None:
        """Compare the file with what an open descriptor reads, or else with the mapping of it that this process has.

        Raises UserError if it is another one; a mapping keeps a file that was removed or replaced.
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
