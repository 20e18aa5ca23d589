"""Restoration of environment variables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def restored_environment() -> Iterator[None]:
    """Undo changes of `os.environ` at the end of the block, so that later child processes do not inherit them."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
