"""Needs of `make setup`: an interpreter, room on the disk, the packages' pins, and the choice of GPUs or CPUs."""

import importlib.util
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import this_checkout  # noqa: F401  # first: makes allstep.* importable

from allstep.commands.horovod.prerequisites import OLDEST_DRIVER, Driver, check_build, check_disk
from allstep.commands.horovod.target import BUILT_AGAINST
from allstep.common.base.errors import UserError

# The packages take 8 GB; 5 GB of them are CUDA libraries, which torch installs even without a GPU.
PACKAGES_GB = 10
TENSORFLOW_GPU_GB = 7  # TensorFlow's wheel for GPUs, and the libraries of CUDA 12


def check(needed_gb: Mapping[Path, float]) -> None:
    """Check the prerequisites of `make setup`: first what is installed, then the disk space.

    Args:
        needed_gb: disk space still needed, in units of 1e9 bytes, by folder.

    Raises:
        UserError: a prerequisite is missing; the message names it and how to get it, in one line.
    """
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        version = sysconfig.get_python_version()
        raise UserError(
            f"expected Python with its venv module, received {version} without; install it: apt-get install "
            f"python{version}-venv"
        )
    check_build()
    for folder, gigabytes in needed_gb.items():
        check_disk(folder, gigabytes)


def pinned(constraints: str) -> dict[str, str]:
    """Return the versions that lines NAME==VERSION pin, of distributions that affect the compiled code."""
    pins = (line.partition(";")[0].strip().partition("==") for line in constraints.splitlines())
    return {name: version for name, _, version in pins if name in BUILT_AGAINST}


def site_packages(environment: Path) -> Path:
    """Return the folder of the packages in an environment of this Python."""
    return environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


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
