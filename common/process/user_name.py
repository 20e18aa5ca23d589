"""A name for a user without one, as in a container that runs by a bare user id: libraries name caches after it."""

from __future__ import annotations

import os
import pwd
from collections.abc import MutableMapping

_VARIABLES = ("LOGNAME", "USER", "LNAME", "USERNAME")
"""Variables in which `getpass.getuser` looks before it looks up the user id."""


def name_user(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set LOGNAME if this user has neither a name in the environment nor an entry in the user database."""
    if any(environ.get(name) for name in _VARIABLES):
        return
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        environ["LOGNAME"] = f"user-{os.getuid()}"
