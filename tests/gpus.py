"""GPUs for tests marked `gpu`; `conftest.py` hides them from all other tests and their processes."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

HIDDEN = "ALLSTEP_TEST_GPUS"
"""Variable that keeps the original CUDA_VISIBLE_DEVICES, also for the processes of pytest-xdist."""


def hide() -> None:
    """Hide all GPUs from this process and its children."""
    os.environ.setdefault(HIDDEN, os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def need(number: int = 1) -> dict[str, str]:
    """Return environment variables that show a process that many GPUs.

    Skips the calling test if there are fewer, even if ALLSTEP_NO_SKIP=1 forbids to skip for a missing program, since
    no program adds a GPU.
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
