"""Environment and context variables: their restoration, and a name for a user without one."""

import contextlib
import os
import pwd
from collections.abc import Iterator, MutableMapping
from contextvars import ContextVar
from typing import Any


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


@contextlib.contextmanager
def within(variable: ContextVar, value: Any) -> Iterator[Any]:
    """Set a context variable to `value` in the block, and yield the value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


_VARIABLES = ("LOGNAME", "USER", "LNAME", "USERNAME")
"""Variables in which `getpass.getuser` looks before it looks up the user id."""


def name_user(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set LOGNAME if this user has neither a name in the environment nor an entry in the user database.

    A container may run by a bare user id, and libraries name caches after the user.
    """
    if any(environ.get(name) for name in _VARIABLES):
        return
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        environ["LOGNAME"] = f"user-{os.getuid()}"
