"""Requirements of tests beyond `make setup`: programs, and the rights of root. GPUs are in `gpus.py`."""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest


def need(*programs: str, root: bool = False) -> None:
    """Skip the calling test, or the whole module at its import, if this machine lacks something, and name it."""
    # Daemons are in folders outside a user's PATH.
    path = f"{os.environ['PATH']}{os.pathsep}/usr/sbin{os.pathsep}/sbin"
    lacks = [program for program in programs if shutil.which(program, path=path) is None]
    if root and os.geteuid() != 0:
        lacks.append("the rights of root")
    if lacks:
        skip(f"this machine lacks {', '.join(lacks)}")


def need_packages(*names: str) -> None:
    """Skip if a package of tests/optional.txt is not installed, which `make setup` leaves to the user."""
    if lacks := [name for name in names if importlib.util.find_spec(name) is None]:
        skip(f"this environment lacks {', '.join(lacks)}: pip install -c constraints.txt -r tests/optional.txt")


def skip(reason: str) -> None:
    """Skip, or fail if ALLSTEP_NO_SKIP=1, which continuous integration sets, so that no test is silently left out."""
    if os.environ.get("ALLSTEP_NO_SKIP") == "1":
        pytest.fail(f"{reason}, and ALLSTEP_NO_SKIP=1 forbids to skip", pytrace=False)
    pytest.skip(reason, allow_module_level=True)
