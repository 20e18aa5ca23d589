"""Record that an installed framework reports about itself, as JSON on standard output."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass

from allstep.common.base.errors import summary
from allstep.common.files.records import to_json
from allstep.common.process.gpu_libraries import loaded_libraries


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
