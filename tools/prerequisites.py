"""What a machine must have before `make setup` downloads anything, each with how to get it."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from console import SetupError

# The environment takes 8 GB, of which CUDA's libraries, which torch brings even where no GPU is, are 5 GB.
NEEDED_DISK_GB = 10
# torch's wheels are built for this glibc (manylinux_2_28).
NEEDED_GLIBC = (2, 28)

# torch's headers use concepts and ranges; a compiler that takes -std=c++20 but lacks them fails much later.
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


def check(environment: Path, *, gpu: bool) -> None:
    """Check everything, cheapest first.

    Raises:
        SetupError: one line that names what lacks and how to get it.
    """
    check_platform()
    check_python()
    check_disk(environment)
    if gpu:
        cuda_home()
    check_compiler()


def check_platform() -> None:
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        raise SetupError(f"needs Linux on x86-64, but this is {system} on {machine}; use such a machine")
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(map(int, version.split(".")[:2])) < NEEDED_GLIBC:
        raise SetupError(
            f"needs glibc 2.28 or newer, but this system has {name or 'another C library'} {version}; "
            "use Debian 10, Ubuntu 20.04, RHEL 8 or newer"
        )


def check_python() -> None:
    version = sysconfig.get_python_version()
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        package = f"python{version}-venv"
        raise SetupError(f"Python {version} lacks its venv module; install it: apt-get install {package}")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        package = f"python{version}-dev"
        raise SetupError(f"Python {version} lacks its C headers; install them: apt-get install {package}")


def check_disk(environment: Path) -> None:
    free_gb = shutil.disk_usage(environment.parent).free / 1e9
    if not environment.exists() and free_gb < NEEDED_DISK_GB:
        where = environment.parent
        raise SetupError(f"needs {NEEDED_DISK_GB} GB in {where}, but {free_gb:.1f} GB are free; free some")


def check_compiler() -> None:
    """Compile and link a C++20 program with the compiler that CMake will take ($CXX, else c++)."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    advice = "install GCC 11 or newer: apt-get install g++ make (or name another with CXX=...)"
    for tool in (compiler[0], os.environ.get("CC", "cc").split()[0], "make"):
        if shutil.which(tool) is None:
            raise SetupError(f"needs a C++20 compiler, but {tool} is not found; {advice}")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "check.cc")
        source.write_text(CXX20_PROGRAM)
        command = [*compiler, "-std=c++20", str(source), "-o", str(Path(folder, "check"))]
        if subprocess.run(command, capture_output=True).returncode != 0:
            name = shlex.join(compiler)
            raise SetupError(f"needs a C++20 compiler, but {name} cannot compile C++20; {advice}")


def compiler_version() -> str:
    """First line of the compiler's --version."""
    command = [*shlex.split(os.environ.get("CXX", "c++")), "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]


def cuda_home() -> tuple[Path, str]:
    """Folder and release ("13.0") of the CUDA toolkit: $CUDA_HOME, else that of nvcc, else /usr/local/cuda.

    Raises:
        SetupError: there is no toolkit, or it is of another major version than torch's libraries.
    """
    needs = "GPU=1 needs a CUDA 13 toolkit, for which torch is built"
    advice = "install CUDA 13 or name its folder with CUDA_HOME=..."
    candidates = [os.environ.get("CUDA_HOME"), _home_of_nvcc_on_path(), "/usr/local/cuda"]
    for home in filter(None, candidates):
        nvcc = Path(home, "bin", "nvcc")
        if not nvcc.exists():
            continue
        output = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
        release = re.search(r"release (\d+\.\d+)", output)
        if release and release[1].startswith("13."):
            return Path(home).resolve(), release[1]
        found = f"{nvcc} is of release {release[1]}" if release else f"{nvcc} does not tell its release"
        raise SetupError(f"{needs}, but {found}; {advice}")
    raise SetupError(f"{needs}, but there is no nvcc; {advice}")


def _home_of_nvcc_on_path() -> str | None:
    """nvcc on the PATH may be a link or a wrapper script; its dry run names the toolkit's folder as TOP."""
    if shutil.which("nvcc") is None:
        return None
    command = ["nvcc", "--dryrun", "-E", "-x", "cu", "/dev/null"]
    dry_run = subprocess.run(command, capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.+)$", dry_run, re.MULTILINE)
    return str(Path(top[1]).resolve()) if top else None
