"""Needs of `make setup`: an interpreter that can make .venv, room on the disk, and the packages' pins."""

import importlib.util
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import this_checkout  # noqa: F401  # first: makes allstep.* importable

from allstep.commands.horovod.prerequisites import check_build, check_disk
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
    check_venv()
    check_build()
    for folder, gigabytes in needed_gb.items():
        check_disk(folder, gigabytes)


def check_venv() -> None:
    version = sysconfig.get_python_version()
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        package = f"python{version}-venv"
        raise UserError(
            f"expected Python with its venv module, received {version} without; install it: apt-get install {package}"
        )


def pinned(constraints: str) -> dict[str, str]:
    """Return the versions that lines NAME==VERSION pin, of distributions that affect the compiled code."""
    pins = (line.partition(";")[0].strip().partition("==") for line in constraints.splitlines())
    return {name: version for name, _, version in pins if name in BUILT_AGAINST}


def site_packages(environment: Path) -> Path:
    """Return the folder of the packages in an environment of this Python."""
    return environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
