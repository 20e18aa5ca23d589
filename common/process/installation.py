"""Report of an installed framework about itself, as JSON on standard output, and NVIDIA's libraries in a process.

Wheels of two frameworks, a toolkit and a container may each contain a copy. A process must have one of each: two copies
of a library, or libraries built for different CUDA releases, fail with errors that do not name them.
"""

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from allstep.common.base.errors import summary
from allstep.common.files.strict_json import to_json

# Libraries by the start of their file names; then follow .so and a version, _NAME of a sublibrary (in cuDNN), or
# .HASH.so in a wheel with a private copy, such as nvJPEG in torchvision.
LIBRARIES = {
    "libcuda": "driver",
    "libnvidia-ml": "NVML",
    "libcudart": "CUDA runtime",
    "libnccl": "NCCL",
    "libcudnn": "cuDNN",
    "libcublas": "cuBLAS",
    "libcublasLt": "cuBLASLt",
    "libcufft": "cuFFT",
    "libcurand": "cuRAND",
    "libcusolver": "cuSOLVER",
    "libcusparse": "cuSPARSE",
    "libnvrtc": "NVRTC",
    "libnvJitLink": "nvJitLink",
    "libnvjpeg": "nvJPEG",
    "libcupti": "CUPTI",
}


def loaded_libraries() -> dict[str, list[str]]:
    """Return the files of this process by library; see `libraries_in`."""
    return libraries_in(Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape"))


def libraries_in(maps: str) -> dict[str, list[str]]:
    """Return the files that each loaded library came from, in the order of `LIBRARIES`; `maps` is /proc/PID/maps."""
    # Five columns and the path, which may contain spaces.
    rows = (line.split(maxsplit=5) for line in maps.splitlines())
    paths = {row[5].removesuffix(" (deleted)") for row in rows if len(row) == 6 and row[5].startswith("/")}
    found: dict[str, list[str]] = {}
    for path in sorted(paths):
        name = LIBRARIES.get(Path(path).name.partition(".")[0])
        if name is not None:
            found.setdefault(name, []).append(path)
    return {name: found[name] for name in LIBRARIES.values() if name in found}


def loaded_twice(libraries: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """Return the libraries of `loaded_libraries` that came from more than one file."""
    return {name: paths for name, paths in libraries.items() if len(paths) > 1}


@dataclass(frozen=True)
class Installation:
    """Installed framework, as its own process reports it."""

    version: str
    cuda: str | None
    """CUDA version that it was built for; None for CPUs only."""
    num_gpus: int
    """Number of GPUs that it sees."""
    no_peer_access: tuple[tuple[int, int], ...]
    """Pairs of GPUs of which one cannot read the other's memory; only PyTorch reports them."""
    libraries: dict[str, tuple[str, ...]]
    """NVIDIA's libraries that its process has loaded, with their files."""
    horovod_error: str | None
    """Error upon importing Horovod for it, if any."""


def report(
    horovod: str, *, version: str, cuda: str | None, num_gpus: int, no_peer_access: tuple[tuple[int, int], ...] = ()
) -> None:
    """Print the `Installation` of this process's framework; `horovod` is Horovod's module for it."""
    error = None
    try:
        importlib.import_module(horovod).is_initialized()  # the import succeeds even without the compiled library
    except Exception as raised:  # any error is part of the report
        error = summary(raised)
    libraries = {name: tuple(paths) for name, paths in loaded_libraries().items()}
    print(json.dumps(to_json(Installation(version, cuda, num_gpus, no_peer_access, libraries, error))))
