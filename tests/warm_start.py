"""Start programs of PyTorch and TensorFlow as forks of a process that has imported the framework: `pytest --warm`.

Most of a launch in a test is the import of a framework. `tests/warm/` has the servers and what their clients do. Tests
with the mark `cold` start all processes anew even then: those of a rank's parent, its words in /proc and the start.
"""

from __future__ import annotations

import atexit
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "warm"
_SOCKETS = "WARM_FOLDER"
"""Variable that names the folder with the servers' sockets; programs look for them only if PYTHONPATH says so."""
_OF_HOST = {"HOME", "PATH"}
"""Variables that another host has set."""
_current = {"warm": False}


def start() -> None:
    """Start the servers, which all processes of pytest share, and which end with this one."""
    os.environ[_SOCKETS] = tempfile.mkdtemp(prefix="warm")
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONUNBUFFERED")}
    servers = subprocess.Popen(
        [sys.executable, str(FOLDER / "warm_server.py"), os.environ[_SOCKETS]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    assert servers.stdout and servers.stdout.readline()
    atexit.register(servers.communicate)


def choose(item: pytest.Item) -> None:
    """Note whether programs of the test that runs are forks, which none is without `pytest --warm`.

    The variables go to this process, too, whose environment jobs of `commands/` give to theirs.
    """
    _current["warm"] = item.config.getoption("--warm") and item.get_closest_marker("cold") is None
    os.environ.update(variables())


def variables() -> Mapping[str, str]:
    """Return the variables by which programs find the servers, none in a test that starts its processes anew."""
    return path() if _current["warm"] else {}


def path(*others: str) -> Mapping[str, str]:
    """Return the variable by which programs find the servers in any test.

    Args:
        others: the other folders that PYTHONPATH has.
    """
    return {"PYTHONPATH": os.pathsep.join([str(FOLDER), *others])}


def exports() -> str:
    """Return what a shell exports so that its programs find the servers although ssh passes no variables on."""
    passed_on = {name: value for name, value in os.environ.items() if name.isidentifier() and name not in _OF_HOST}
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in passed_on.items())
