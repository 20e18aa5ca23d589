"""What a test needs of the machine beyond `make setup`: programs, and the rights of root. `gpus.py` has the GPUs."""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest


def need(*programs: str, root: bool = False) -> None:
    """Skip the calling test, or the whole module at its import, where this machine lacks something; says what."""
    # Daemons live where a user's PATH does not lead.
    path = f"{os.environ['PATH']}{os.pathsep}/usr/sbin{os.pathsep}/sbin"
    lacks = [program for program in programs if shutil.which(program, path=path) is None]
    if root and os.geteuid() != 0:
        lacks.append("the rights of root")
    if lacks:
        skip(f"this machine lacks {', '.join(lacks)}")


def need_packages(*names: str) -> None:
    """Skip where a package of tests/optional.txt is not installed, which `make setup` leaves to the user."""
    if lacks := [name for name in names if importlib.util.find_spec(name) is None]:
        skip(f"this environment lacks {', '.join(lacks)}: pip install -c constraints.txt -r tests/optional.txt")


def skip(reason: str) -> None:
    """Skip, or fail where ALLSTEP_NO_SKIP=1: continuous integration sets it, so nothing goes untested unnoticed."""
    if os.environ.get("ALLSTEP_NO_SKIP") == "1":
        pytest.fail(f"{reason}, and ALLSTEP_NO_SKIP=1 forbids to skip", pytrace=False)
    pytest.skip(reason, allow_module_level=True)
