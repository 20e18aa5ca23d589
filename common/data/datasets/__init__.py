"""Data sets: `prepare` once a host, `load` on every rank, then read uint8 images by sample index."""

from __future__ import annotations

import importlib
from types import ModuleType

from allstep.common.base.errors import UserError
from allstep.common.config.data_config import PYTHON, DataConfig
from allstep.common.data.datasets.base import Dataset, Split, Task
from allstep.common.data.datasets.files import data_dir_errors

__all__ = ["DataConfig", "Dataset", "Split", "Task", "load", "prepare"]

_MODULES = {
    "digits": "datasets.digits",
    "mnist": "datasets.mnist",
    "fashion-mnist": "datasets.mnist",
    "cifar10": "datasets.cifar10",
    "image-folder": "datasets.image_folder",
    "synthetic": "datasets.synthetic",
    "text": "datasets.text",
    "text-topics": "datasets.text",
    "npz": "formats.npz",
    "parquet": "formats.parquet",
    "tfrecord": "formats.tfrecord",
    "webdataset": "formats.webdataset",
    "hf": "formats.hf",
    PYTHON: "formats.python_file",
}


def prepare(config: DataConfig) -> None:
    """Puts the data set's files in place: downloads, verifies, unpacks. Does nothing where all is in place.

    For one rank of each host, while the others wait; `load` then works on all of them. Safe to run in several
    processes at once.

    Raises:
        UserError: a file cannot be had or is not what it should be, or `data_dir` cannot be used.
    """
    with data_dir_errors(config.data_dir):
        _module(config).prepare(config)


def load(config: DataConfig) -> Dataset:
    """Opens what `prepare` has put in place.

    Raises:
        UserError: a file or a flag is not what it should be.
    """
    with data_dir_errors(config.data_dir):
        return _module(config).load(config)


def _module(config: DataConfig) -> ModuleType:
    if config.kind not in _MODULES:
        raise UserError(
            f"expected a data set that --dataset can name, received {config.dataset}, which a program hands over to a "
            "Session; name another"
        )
    # Imported when asked for, so that a run pays for its own data set alone.
    return importlib.import_module(f"allstep.common.data.{_MODULES[config.kind]}")
