"""Start programs of PyTorch and TensorFlow as forks of a process that has imported the framework: `pytest --warm`.

Most of a launch in a test is the import of a framework. `tests/warm/` has the server and what its clients do. Tests
with the mark `cold` start all processes anew even then: those of processes, signals, hosts and the start itself.
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parent / "warm"
_current = {"cold": True}


def choose(item: pytest.Item) -> None:
    """Note whether the test that runs starts its processes anew, as all do without `pytest --warm`."""
    _current["cold"] = not item.config.getoption("--warm") or item.get_closest_marker("cold") is not None


def variables() -> Mapping[str, str]:
    """Return the variables by which programs find the server, none in a test that starts its processes anew."""
    return {} if _current["cold"] else started()


@functools.cache
def started() -> Mapping[str, str]:
    """Start the server, which ends with this process."""
    folder = tempfile.mkdtemp(prefix="warm")
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    server = subprocess.Popen(
        [sys.executable, str(_FOLDER / "warm_server.py"), folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    assert server.stdout and server.stdout.readline()

    atexit.register(server.communicate)
    return {"WARM_FOLDER": folder, "PYTHONPATH": str(_FOLDER)}
