"""Output of other programs and content of kernel files, or None if there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path


def run_output(*command: str, given: str = "", seconds: float = 10) -> str | None:
    """Return the output of a command; None if the command does not exist, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    environ = {**os.environ, "LC_ALL": "C"}
    try:
        result = subprocess.run(command, input=given, capture_output=True, text=True, timeout=seconds, env=environ)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def content(path: str | Path) -> str | None:
    """Return the content of a kernel file; None if it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
