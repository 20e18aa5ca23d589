"""Start programs of PyTorch and TensorFlow as forks of a process that has imported the framework.

Most of a launch in a test is the import of a framework. `tests/warm/` has the servers and what their clients do. With
`pytest --cold` all processes start anew, and those of tests with the mark `cold` always do: tests of processes,
signals, hosts and the start itself.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "warm"
_SOCKETS = "WARM_FOLDER"
"""Variable that names the folder with the servers' sockets; programs look for them only if PYTHONPATH says so."""
_current = {"cold": True}


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
    """Note whether the test that runs starts its processes anew."""
    _current["cold"] = item.config.getoption("--cold") or item.get_closest_marker("cold") is not None


def variables(*others: str) -> Mapping[str, str]:
    """Return the variable by which programs find the servers, none in a test that starts its processes anew.

    Args:
        others: the other folders that PYTHONPATH has.
    """
    return {} if _current["cold"] else {"PYTHONPATH": os.pathsep.join([str(FOLDER), *others])}
