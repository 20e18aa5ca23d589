"""Keep from a library's import what nobody needs: chatter, other libraries, passes of the garbage collector."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from allstep.common.compat import without_unused_libraries


@contextmanager
def lean_import() -> Iterator[None]:
    """For the import of a framework: without its chatter, and without what it would import in vain."""
    with stderr_held_back(), without_unused_libraries(), uncollected():
        yield


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector from what the block imports, now and later: it stays until the process ends.

    Its passes take a fifth of the start of a trainer. Where a framework is there already, nothing is kept: what else
    has come to be by then, as a user's objects or the session that an elastic job leaves, has to be collected.
    """
    if not gc.isenabled() or sys.modules.keys() & {"torch", "tensorflow"}:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def stderr_held_back() -> Iterator[BinaryIO]:
    """Hold back what is written to standard error, by C++ code too; show it only where the block raises.

    The block gets the file with what is held back. TensorFlow prints lines about oneDNN while it is imported that none
    of its environment variables silences.
    """
    sys.stderr.flush()
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield held
        except BaseException:
            sys.stderr.flush()
            held.seek(0)
            os.write(terminal, held.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)
