"""Data sets: call `prepare` once per host and `load` on every rank, then read samples by index."""

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
    """Download, verify and unpack the data set's files unless that was done before.

    One rank of each host calls it while the others wait; then `load` works on all of them. It may run in several
    processes at once. Raises UserError if a file is unavailable or has the wrong content, or `data_dir` cannot be used.
    """
    with data_dir_errors(config.data_dir):
        _module(config).prepare(config)


def load(config: DataConfig) -> Dataset:
    """Open the data set that `prepare` has put in place.

    Raises UserError if a file has the wrong content, or a flag has a wrong value.
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
    return importlib.import_module(f"allstep.common.data.{_MODULES[config.kind]}")
