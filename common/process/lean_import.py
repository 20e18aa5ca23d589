"""Keep from a library's import what nobody needs: its chatter, and other libraries that it would import."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

# Keras imports them for wrappers and pictures that the trainer does not use: a fifth of its start-up.
_UNUSED = ("sklearn", "scipy", "matplotlib")


@contextmanager
def lean_import() -> Iterator[None]:
    """For the import of a framework: without its chatter, and without what it would import in vain."""
    with stderr_held_back(), hidden(*_UNUSED):
        yield


@contextmanager
def stderr_held_back() -> Iterator[None]:
    """Hold back what is written to standard error, by C++ code too; show it only where the block raises.

    TensorFlow prints lines about oneDNN while it is imported that none of its environment variables silences.
    """
    sys.stderr.flush()
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            sys.stderr.flush()
            held.seek(0)
            os.write(terminal, held.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)


@contextmanager
def hidden(*modules: str) -> Iterator[None]:
    """Make `import MODULE` fail as if it were not installed, for libraries that only look whether it is there."""
    absent = [module for module in modules if module not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # None is what importlib takes for "not to be had"
    try:
        yield
    finally:
        for module in absent:
            del sys.modules[module]
