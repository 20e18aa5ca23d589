"""The connections that a library has opened in this process, and how to end them from outside of it.

Horovod 0.28.1 keeps its connections under Gloo when it is shut down after a failure. Ranks that wait for others than
the lost one then hear nothing, and wait until the timeout of Gloo, half a minute.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path


class Connections:
    """Sockets that were opened inside of a block."""

    def __init__(self) -> None:
        self._names: set[str] = set()  # as the kernel numbers them: descriptors may be used anew

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note the sockets that the block opens, in place of those noted before."""
        before = set(_sockets())
        yield
        self._names = set(_sockets()) - before

    def end(self) -> None:
        """End those that are still open: whoever waits for them, here and at their other ends, gets an error."""
        for name, descriptor in _sockets().items():
            if name in self._names:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)  # a listener, or one that has ended, refuses


def _sockets() -> dict[str, int]:
    """The descriptors of this process's sockets by the kernel's names of them."""
    sockets = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since
            name = os.readlink(entry)
            if name.startswith("socket:"):
                sockets[name] = int(entry.name)
    return sockets
