"""Whether `make setup` builds for GPUs: what was asked for, what .venv is, what this machine has."""

from __future__ import annotations

import ctypes
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from console import SetupError

# The first driver that runs CUDA 13, for which torch's wheels and our Horovod are compiled (CUDA 13.0's release notes).
OLDEST_DRIVER = 580


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver on this machine."""

    found: bool
    # Major version; None where the kernel does not tell it, as under WSL and in some containers.
    version: int | None = None


@dataclass(frozen=True)
class Choice:
    """What the environment is built for, and why, in words that go on after "for GPUs" or "for CPUs"."""

    gpu: bool
    reason: str


def choose(asked: str, *, before: bool | None, driver: Driver) -> Choice:
    """Build for GPUs where that was asked for, else as .venv is, else where a driver is there.

    Args:
        asked: the variable GPU of `make setup`: "0", "1", or "" if it was not given.
        before: what the last set-up chose, None if there was none.

    Raises:
        SetupError: GPU is something else.
    """
    if asked not in ("", "0", "1"):
        raise SetupError(f"expected GPU to be 1 (Horovod with NCCL) or 0 (without), received {asked!r}; correct it")
    if asked:
        return Choice(asked == "1", f"GPU={asked} says so")
    works = driver.found and (driver.version is None or driver.version >= OLDEST_DRIVER)
    if before is not None:
        other = " (make setup GPU=1 builds for the GPUs here)" if works and not before else ""
        return Choice(before, f"as the last set-up did{other}")
    if works:
        return Choice(True, "NVIDIA's driver is here (make setup GPU=0 builds for CPUs)")
    if driver.found:
        return Choice(False, f"the driver is {driver.version}, and CUDA 13 needs {OLDEST_DRIVER} or newer")
    return Choice(False, "no driver of NVIDIA's is here (make setup GPU=1 builds for GPUs elsewhere)")


def find_driver(root: Path = Path("/")) -> Driver:
    """The driver by its kernel module, its library, or its tool: a container may have any one of them alone."""
    version = root / "proc" / "driver" / "nvidia" / "version"
    if version.exists():
        return Driver(True, kernel_module_version(version.read_text()))
    return Driver(_library_loads("libcuda.so.1") or shutil.which("nvidia-smi") is not None)


def kernel_module_version(text: str) -> int | None:
    """The major version in what /proc/driver/nvidia/version says; the second line has the compiler's."""
    module = re.search(r"^NVRM version:.*?\s(\d+)\.\d+", text, re.MULTILINE)
    return int(module[1]) if module else None


def _library_loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
