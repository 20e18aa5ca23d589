"""Choice whether `make setup` builds for GPUs, by the user's request, the existing .venv, and this machine."""

from __future__ import annotations

import ctypes
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from allstep.common.base.errors import UserError

# First driver for CUDA 13 (release notes of CUDA 13.0), for which torch's wheels and our Horovod are compiled.
OLDEST_DRIVER = 580


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver on this machine."""

    found: bool
    # Major version; None if the kernel does not report it, as under WSL and in some containers.
    version: int | None = None

    @property
    def works(self) -> bool:
        """Whether it is new enough for CUDA 13, or does not tell."""
        return self.found and (self.version is None or self.version >= OLDEST_DRIVER)


@dataclass(frozen=True)
class Choice:
    """Whether the environment is built for GPUs, and the reason, in words that follow "for GPUs" or "for CPUs"."""

    gpu: bool
    reason: str


def choose(asked: str, *, before: bool | None, driver: Driver) -> Choice:
    """Choose GPUs or CPUs: as requested, else as in the existing .venv, else GPUs if there is a driver.

    Args:
        asked: the variable GPU of `make setup`: "0", "1", or "" if it was not given.
        before: the choice of the last set-up, None if there was none.

    Raises:
        UserError: GPU has another value.
    """
    if asked not in ("", "0", "1"):
        raise UserError(f"expected GPU to be 1 (Horovod with NCCL) or 0 (without), received {asked!r}; correct it")
    if asked:
        return Choice(asked == "1", f"GPU={asked} says so")
    if before is not None:
        other = " (make setup GPU=1 builds for the GPUs here)" if driver.works and not before else ""
        return Choice(before, f"as the last set-up did{other}")
    if driver.works:
        return Choice(True, "NVIDIA's driver is here (make setup GPU=0 builds for CPUs)")
    if driver.found:
        return Choice(False, f"the driver is {driver.version}, and CUDA 13 needs {OLDEST_DRIVER} or newer")
    return Choice(False, "no driver of NVIDIA's is here (make setup GPU=1 builds for GPUs elsewhere)")


def find_driver(root: Path = Path("/")) -> Driver:
    """Find the driver by its kernel module, its library or its tool, since a container may have only one of them."""
    version = root / "proc" / "driver" / "nvidia" / "version"
    if version.exists():
        return Driver(True, kernel_module_version(version.read_text()))
    return Driver(_library_loads("libcuda.so.1") or shutil.which("nvidia-smi") is not None)


def kernel_module_version(text: str) -> int | None:
    """Parse the major version in /proc/driver/nvidia/version, whose second line has the compiler's version."""
    module = re.search(r"^NVRM version:.*?\s(\d+)\.\d+", text, re.MULTILINE)
    return int(module[1]) if module else None


def _library_loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
