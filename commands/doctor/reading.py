"""What other programs and the kernel say, where they say anything."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def run_output(*command: str, given: str = "", seconds: float = 10) -> str | None:
    """What a command prints; None where there is no such command, or it fails or hangs."""
    environ = {**os.environ, "LC_ALL": "C"}
    try:
        result = subprocess.run(command, input=given, capture_output=True, text=True, timeout=seconds, env=environ)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def first_line(*command: str) -> str | None:
    """The first line that a command prints."""
    lines = (run_output(*command) or "").splitlines()
    return lines[0] if lines else None


def content(path: str | Path) -> str | None:
    """What a file of the kernel's says; None where there is none."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
