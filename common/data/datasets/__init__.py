"""Data sets: call `prepare` once per host and `load` on every rank, then read samples by index."""

from __future__ import annotations

import importlib
from types import ModuleType

from allstep.common.data.datasets.base import Dataset, Split, Task
from allstep.common.data.datasets.config import PYTHON, DataConfig
from allstep.common.data.datasets.files import data_dir_errors
from allstep.common.process.errors import UserError

__all__ = ["DataConfig", "Dataset", "Split", "Task", "load", "prepare"]

_MODULES = {
    "digits": "digits",
    "mnist": "mnist",
    "fashion-mnist": "mnist",
    "cifar10": "cifar10",
    "image-folder": "image_folder",
    "synthetic": "synthetic",
    "text": "text",
    "text-topics": "text",
    "npz": "npz",
    "parquet": "parquet",
    "tfrecord": "tfrecord",
    "webdataset": "webdataset",
    "hf": "hf",
    PYTHON: "python_file",
}


def prepare(config: DataConfig) -> None:
    """Download, verify and unpack the data set's files unless that was done before.

    One rank of each host calls it while the others wait; then `load` works on all of them. It may run in several
    processes at once.

    Raises:
        UserError: a file is unavailable or has the wrong content, or `data_dir` cannot be used.
    """
    with data_dir_errors(config.data_dir):
        _module(config).prepare(config)


def load(config: DataConfig) -> Dataset:
    """Open the data set that `prepare` has put in place.

    Raises:
        UserError: a file has the wrong content, or a flag has a wrong value.
    """
    with data_dir_errors(config.data_dir):
        return _module(config).load(config)


def _module(config: DataConfig) -> ModuleType:
    if config.kind not in _MODULES:
        raise UserError(
            f"expected a data set that --dataset can name, received {config.dataset}, which a program hands over to a "
            "Session; name another"
        )
    # Imported on demand, so that a run imports only what its own data set needs.
    return importlib.import_module(f"{__name__}.{_MODULES[config.kind]}")
