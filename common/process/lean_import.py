"""Context managers that avoid needless output, imports and garbage collection while a library is imported."""

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from allstep.common.base.compat import without_unused_libraries


@contextmanager
def lean_import() -> Iterator[None]:
    """Import a framework within the block without its start-up output, unused libraries or garbage collection."""
    with stderr_held_back(), without_unused_libraries(), uncollected():
        yield


@contextmanager
def uncollected() -> Iterator[None]:
    """Exclude the objects that the block imports from garbage collection, now and later.

    Garbage collection takes a fifth of a trainer's start-up. If a framework is already imported, nothing is excluded,
    because objects created since then, such as the user's or an elastic job's last session, must be collected.
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
    """Hold back output to standard error, including that of C++ code, and show it only if the block raises.

    The block gets the file with the held-back output. While it is imported, TensorFlow prints lines about oneDNN that
    no environment variable turns off.
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
