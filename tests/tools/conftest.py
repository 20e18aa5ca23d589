"""Real launches for the tests of the installed build."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 120


def environment_without_launcher() -> dict[str, str]:
    """Return this process's environment without the variables of launchers and activated environments."""
    prefixes = ("HOROVOD_", "OMPI_", "PMIX_", "OPAL_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(prefixes)}
    return env | {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "PATH": "/usr/local/bin:/usr/bin:/bin"}


@pytest.fixture
def run_ranks():
    """Run a Python program on two ranks: run_ranks(program, "--gloo"); stdout holds stderr as well."""

    def run(program: str, *options: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
        horovodrun = Path(sys.prefix, "bin", "horovodrun")
        command = [str(horovodrun), "-np", "2", *options, sys.executable, "-c", program]
        return subprocess.run(
            command,
            env=environment_without_launcher() | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )

    return run


@pytest.fixture
def run_alone():
    """Run a Python program in one process that no launcher started."""

    def run(program: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-c", program],
            env=environment_without_launcher(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )

    return run
