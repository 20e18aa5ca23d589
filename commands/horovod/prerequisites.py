"""Checks of a machine before anything is downloaded: what a build of Horovod needs, with advice, and GPUs' driver."""

import ctypes
import os
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from allstep.commands.horovod.logged import diagnosis
from allstep.common.base.errors import UserError

BUILD_GB = 1  # Horovod's object files and wheel
INSTALLED_GB = 0.2  # Horovod and Open MPI
# torch's wheels are built for this glibc (manylinux_2_28).
NEEDED_GLIBC = (2, 28)
# First driver for CUDA 13 (release notes of CUDA 13.0), for which torch's wheels and our Horovod are compiled.
OLDEST_DRIVER = 580
COMPILER_ADVICE = "install GCC 11 or newer: apt-get install g++ make (or name another with CXX=...)"

# torch's headers use concepts and ranges; a compiler that accepts -std=c++20 but lacks them would fail much later.
CXX20_PROGRAM = """
#include <concepts>
#include <ranges>
#include <vector>
template <std::integral T> T total(const std::vector<T>& values) {
  T sum = 0;
  for (T value : values | std::views::reverse) sum += value;
  return sum;
}
int main() { return total(std::vector<int>{1, -1}); }
"""


def check_platform() -> None:
    """Refuse a machine for which torch's wheels are not built."""
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        raise UserError(f"expected Linux on x86-64, received {system} on {machine}; use such a machine")
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(map(int, version.split(".")[:2])) < NEEDED_GLIBC:
        raise UserError(
            f"expected glibc 2.28 or newer, received {name or 'another C library'} {version}; "
            "use Debian 10, Ubuntu 20.04, RHEL 8 or newer"
        )


def check_build() -> None:
    """Refuse a machine that lacks a prerequisite of compiling Horovod."""
    check_platform()
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        version = sysconfig.get_python_version()
        raise UserError(
            f"expected Python with its C headers, received {version} without; install them: apt-get install "
            f"python{version}-dev"
        )
    check_compiler()


def check_disk(folder: Path, needed_gb: float) -> None:
    """Refuse a disk with less room for a folder, which need not exist yet, than so many units of 1e9 bytes."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free_gb = shutil.disk_usage(there).free / 1e9
    if free_gb < needed_gb:
        raise UserError(f"expected {needed_gb:.1f} GB of free disk for {folder}, received {free_gb:.1f} GB; free some")


def compiler(variable: str, default: str) -> list[str]:
    """Return the words of the compiler command in the environment variable CXX or CC.

    Raises UserError if the command cannot be parsed as a shell does.
    """
    text = os.environ.get(variable) or default
    try:
        words = shlex.split(text)
    except ValueError:  # an unclosed quote
        words = []
    if not words:
        raise UserError(f"expected a compiler's command in {variable}, received {text!r}; correct or unset it")
    return words


def check_compiler() -> None:
    """Compile, link and run a C++20 program with the compiler that CMake will use ($CXX, else c++)."""
    command = compiler("CXX", "c++")
    _find(command[0], compiler("CC", "cc")[0], "make")
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "check.cc"), Path(folder, "check")
        source.write_text(CXX20_PROGRAM)
        compiled = _run([*command, "-std=c++20", str(source), "-o", str(program)])
        if cause := diagnosis(compiled.stderr):  # a full disk for temporary files
            raise UserError(cause)
        if compiled.returncode or not program.exists() or _run([str(program)]).returncode:
            raise UserError(
                f"expected a C++20 compiler, received {shlex.join(command)}, which cannot compile C++20; "
                f"{COMPILER_ADVICE}"
            )


def _find(*tools: str) -> None:
    if lacking := next((tool for tool in tools if shutil.which(tool) is None), None):
        raise UserError(f"expected a C++20 compiler, received none: {lacking} is not found; {COMPILER_ADVICE}")


def _run(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, text=True, errors="replace")


def compiler_version() -> str:
    """Return the first line of the compiler's --version."""
    command = [*compiler("CXX", "c++"), "--version"]
    _find(command[0])
    return _run(command).stdout.partition("\n")[0]


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
