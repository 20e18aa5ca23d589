"""Connections that a library has opened in this process, and a way to end them from outside the library.

With Gloo, Horovod 0.28.1 keeps its connections open when it is shut down after a failure. Ranks that wait for a rank
other than the lost one then get no error, and wait for Gloo's timeout of half a minute.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path


class Connections:
    """Sockets that were opened inside a block."""

    def __init__(self) -> None:
        self._names: set[str] = set()  # names by the kernel, because descriptors may be reused

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note the sockets that the block opens, and forget those noted before."""
        before = set(_sockets())
        yield
        self._names = set(_sockets()) - before

    def end(self) -> None:
        """Shut down the noted sockets that are still open; threads and processes at both ends get an error."""
        for name, descriptor in _sockets().items():
            if name in self._names:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)  # a listener, or one that has ended, refuses


def _sockets() -> dict[str, int]:
    """Return the descriptors of this process's sockets by the kernel's names."""
    sockets = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since
            name = os.readlink(entry)
            if name.startswith("socket:"):
                sockets[name] = int(entry.name)
    return sockets
