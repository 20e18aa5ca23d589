"""Threads, versions and processor: what the bits of a run with --slices depend on besides its flags."""

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

from allstep.common.base.errors import UserError
from allstep.common.base.version import VERSION
from allstep.common.config.train_config import TrainConfig
from allstep.common.launch.variables import read_num_threads

_LIBRARIES = ("torch", "tensorflow", "keras", "threads", "processor")


def describe(config: TrainConfig, versions: Mapping[str, str]) -> dict[str, str]:
    """Return allstep's version and those of a worker's libraries, with --slices also a rank's threads and processor."""
    versions = {"allstep": VERSION, **versions}
    if not config.parallel.slices:
        return versions
    return {**versions, "threads": str(read_num_threads(os.environ) or 1), "processor": processor()}


def check_threads(config: TrainConfig, saved: Mapping[str, str]) -> None:
    """Refuse to resume with a different number of threads, since the user can set the earlier one.

    `saved` is the result of `describe` in the run that wrote the checkpoint.
    """
    threads, before = describe(config, {}).get("threads"), saved.get("threads")
    if threads and before and threads != before:
        raise UserError(
            f"expected {before} threads a rank with --slices, as in the run that wrote the checkpoint, received "
            f"{threads}; set OMP_NUM_THREADS={before}, or leave --slices out"
        )


def differences(now: Mapping[str, str], saved: Mapping[str, str]) -> str | None:
    """Describe how a run with --slices differs from the run that wrote the checkpoint; None if it does not."""
    if "threads" not in now:
        return None
    if "threads" not in saved:
        return "the run that wrote the checkpoint had no --slices: from here on bits are those of no other run"
    names = [name for name in _LIBRARIES if now.get(name) != saved.get(name)]
    changed = ", ".join(f"{name} {now.get(name, 'none')} instead of {saved.get(name, 'none')}" for name in names)
    return f"bits depend on what has changed since the checkpoint was written: {changed}" if names else None


def processor() -> str:
    """Return the name of this machine's processor."""
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()
