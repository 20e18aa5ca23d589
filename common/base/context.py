"""Context variables, which functions read that a block calls, however deeply."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any


@contextlib.contextmanager
def within(variable: ContextVar, value: Any) -> Iterator[Any]:
    """Set a variable in the block, which has its value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
