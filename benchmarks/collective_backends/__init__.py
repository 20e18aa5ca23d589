"""What `allstep collectives` measures: one file a library, each with the collectives that it has.

A backend has `rank` and `size` and, for each collective of COLLECTIVES that its library offers, a method of that name
with `_` for `-`. It takes this rank's input, a float32 array, and returns an operation.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

COLLECTIVES = ("all-reduce", "all-gather", "broadcast", "reduce-scatter", "all-to-all")


@dataclass(frozen=True)
class Operation:
    """One collective on one buffer, to be run many times."""

    run: Callable[[], object]
    """Moves the data, and returns when the result is there."""
    result: Callable[[], np.ndarray]
    """The result of the last run."""
    times: int = 1
    """How often a run moves the data, one time after the other."""


@dataclass(frozen=True)
class Library:
    """Where a backend is, and how its ranks are started."""

    module: str
    """In this package."""
    name: str
    """Of the class in it."""
    launcher: str
    """One of `harness.launchers.LAUNCHERS`."""
    is_horovod: bool = False
    """In either framework: what it costs decides what Horovod should be set to."""


BACKENDS = {
    "memcpy": Library("memcpy", "Memcpy", "mpirun"),
    "mpi4py": Library("mpi", "Mpi", "mpirun"),
    "horovod-torch": Library("horovod_torch", "HorovodTorch", "horovodrun-mpi", is_horovod=True),
    "horovod-tensorflow": Library("horovod_tensorflow", "HorovodTensorFlow", "horovodrun-mpi", is_horovod=True),
    "torch-gloo": Library("torch_gloo", "TorchGloo", "torchrun"),
    "tf-distribute": Library("tf_distribute", "TfDistribute", "horovodrun-mpi"),
}


def is_horovod(name: str) -> bool:
    """Whether the backend of that name is Horovod, in either framework."""
    return BACKENDS[name].is_horovod


def create(name: str) -> Any:
    """The backend of that name, with its ranks met; its library is imported now and no earlier."""
    library = BACKENDS[name]
    return getattr(importlib.import_module(f"allstep.benchmarks.collective_backends.{library.module}"), library.name)()
