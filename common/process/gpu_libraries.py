"""Which file each of NVIDIA's libraries in this process came from.

Wheels of two frameworks, a toolkit and a container may each bring a copy. A process must have one of each: two of one
library, or two that were built for different releases of CUDA, fail in ways that name neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

# By what their files' names begin with; what follows is .so and a version, _name of a part (cuDNN's), or .HASH.so
# where another wheel brings its own, as torchvision does nvJPEG.
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
    """The files by library, of this process; see `libraries_in`."""
    return libraries_in(Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape"))


def libraries_in(maps: str) -> dict[str, list[str]]:
    """The files that each library was loaded from, in the order of `LIBRARIES`; only libraries that are loaded.

    Args:
        maps: what /proc/PID/maps says.
    """
    # Five columns, and the path, which may hold spaces.
    rows = (line.split(maxsplit=5) for line in maps.splitlines())
    paths = {row[5].removesuffix(" (deleted)") for row in rows if len(row) == 6 and row[5].startswith("/")}
    found: dict[str, list[str]] = {}
    for path in sorted(paths):
        name = LIBRARIES.get(Path(path).name.partition(".")[0])
        if name is not None:
            found.setdefault(name, []).append(path)
    return {name: found[name] for name in LIBRARIES.values() if name in found}


def loaded_twice(libraries: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """Those of `loaded_libraries` that came from more than one file."""
    return {name: paths for name, paths in libraries.items() if len(paths) > 1}
