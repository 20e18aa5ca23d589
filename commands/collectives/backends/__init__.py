"""Backends of `allstep collectives`: one class per library, with the collectives that the library has.

A backend has `rank` and `size` and, for each collective in COLLECTIVES that its library offers, a method of that name
with `_` for `-`. The method takes this rank's input, a float32 array, and returns an operation.
"""

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
    """Function that moves the data and returns when the result is there."""
    result: Callable[[], np.ndarray]
    """Function that returns the result of the last run."""
    times: int = 1
    """Number of times that one run moves the data, one after the other."""


def returning(call: Callable[[], Any]) -> Operation:
    """Return the operation of a call that returns a tensor with the result."""
    last = []

    def run() -> None:
        last[:] = [call()]

    return Operation(run, lambda: last[0].numpy())


@dataclass(frozen=True)
class Library:
    """Module, class and launcher of a backend."""

    module: str
    """Name of the module in this package."""
    name: str
    """Name of the class in that module."""
    launcher: str
    """Key in `jobs.LAUNCHERS`."""
    packages: tuple[str, ...] = ()
    """Packages that it needs, by their import names."""
    is_horovod: bool = False
    """Whether this is Horovod, in either framework: settings are recommended from its times."""


BACKENDS = {
    "memcpy": Library("mpi", "Memcpy", "mpirun"),
    "mpi4py": Library("mpi", "Mpi", "mpirun"),
    "horovod-torch": Library("of_torch", "HorovodTorch", "horovodrun-mpi", ("torch", "horovod"), is_horovod=True),
    "horovod-tensorflow": Library(
        "of_tensorflow", "HorovodTensorFlow", "horovodrun-mpi", ("tensorflow", "horovod"), is_horovod=True
    ),
    "torch-gloo": Library("of_torch", "TorchGloo", "torchrun", ("torch",)),
    "tf-distribute": Library("of_tensorflow", "TfDistribute", "horovodrun-mpi", ("tensorflow", "horovod")),
}


def create(name: str) -> Any:
    """Import the library of a backend, connect its ranks and return the backend."""
    library = BACKENDS[name]
    return getattr(importlib.import_module(f"allstep.commands.collectives.backends.{library.module}"), library.name)()
