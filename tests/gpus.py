"""What tests marked `gpu` need: the GPUs, which `conftest.py` hides from all other tests and what they start."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

HIDDEN = "ALLSTEP_TEST_GPUS"
"""Where `conftest.py` has put what CUDA_VISIBLE_DEVICES was, for the processes of pytest-xdist as well."""


def hide() -> None:
    """Have this process, and what it starts, see no GPU."""
    os.environ.setdefault(HIDDEN, os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def need(number: int = 1) -> dict[str, str]:
    """The environment variables with which a process sees that many GPUs.

    Skips the calling test where there are fewer, also where ALLSTEP_NO_SKIP=1 forbids to skip for want of a program:
    no program brings a GPU.
    """
    visible = os.environ[HIDDEN]
    found = [one for one in visible.split(",") if one] if visible != "all" else _installed()
    if len(found) < number:
        pytest.skip(f"this machine has {len(found)} of {number} GPUs")
    return {"CUDA_VISIBLE_DEVICES": ",".join(found[:number])}


def _installed() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], text=True, capture_output=True)
    return [str(number) for number, line in enumerate(listed.stdout.splitlines()) if line.startswith("GPU ")]
