"""Calls of pip for an interpreter, whether its environment has pip or not."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

from allstep.commands.horovod.logged import run_logged
from allstep.common.base.errors import UserError


def pip_command(python: Path) -> list[str]:
    """Return the words that run pip for `python`: its own pip, else the one that Python itself bundles.

    Raises:
        UserError: there is neither.
    """
    has_pip = subprocess.run([python, "-c", "import pip"], capture_output=True, cwd="/").returncode == 0
    words = [str(python), "-m", "pip"] if has_pip else [str(python), f"{_bundled_pip()}/pip"]
    return [*words, "--disable-pip-version-check", "--no-input"]


def _bundled_pip() -> Path:
    folder = sysconfig.get_config_var("WHEEL_PKG_DIR") or Path(sysconfig.get_path("stdlib"), "ensurepip", "_bundled")
    wheels = sorted(Path(folder).glob("pip-*.whl"))
    if not wheels:
        raise UserError(
            f"expected pip in {sys.prefix}, received none, and Python bundles none; install it: uv pip install pip"
        )
    return wheels[-1]


def pip(
    python: Path,
    *arguments: str,
    log: Path,
    progress: Callable[[str], str | None] = lambda line: None,
    env: Mapping[str, str] | None = None,
    to_its_end: bool = False,
) -> None:
    """Run pip with these arguments; its output goes to the log.

    Args:
        progress, to_its_end: as of `run_logged`; what waits for the package index is told in any case.

    Raises:
        UserError, CommandFailed: as `run_logged`.
    """
    env = {**os.environ, **(env or {})}
    # Variables that would put packages elsewhere than where the caller wants them.
    for name in ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_REQUIRE_VIRTUALENV"):
        env.pop(name, None)

    def told(line: str) -> str | None:
        if "after connection broken by" in line:
            return "the package index does not answer; pip tries again"
        return progress(line)

    command = [*pip_command(python), *arguments]
    run_logged(command, log, progress=told, env=env, cwd=Path("/"), to_its_end=to_its_end)
