"""NVIDIA's driver on this machine, if any."""

from __future__ import annotations

import ctypes
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

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
