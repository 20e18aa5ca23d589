"""FILE.py:FUNCTION: what a function of the user's own returns, called on every rank.

It returns arrays: (x_train, y_train, x_validation, y_validation), or ((x_train, y_train), (x_test, y_test)) as Keras'
data sets do, or (x, y), of which a share validates. Or objects that have `__len__` and `read(indices, epoch)`, one or a
pair. Or a `Dataset`.
"""

from __future__ import annotations

from typing import Any

from allstep.common.catalog.user_file import call, import_function, parse
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.base import Dataset
from allstep.common.data.formats.user_samples import as_dataset


def prepare(config: DataConfig) -> None:
    """Nothing to prepare: every rank calls the function."""


def load(config: DataConfig) -> Dataset:
    """Imports the file and calls the function, without arguments.

    Raises:
        UserError: there is no such function, it fails, or returns something else.
    """
    where, file = config.dataset, parse(config.dataset)
    assert file is not None  # it is of this kind
    samples = call(import_function(*file, "--dataset"), flag="--dataset")
    if isinstance(samples, Dataset):
        return samples
    train, validation = _parts(samples)
    return as_dataset(train, validation, where=where, share=config.validation_share, seed=config.seed)


def _parts(samples: Any) -> tuple[Any, Any]:
    """What trains and what validates, or None for the latter."""
    if isinstance(samples, (tuple, list)):
        if len(samples) == 4:
            return tuple(samples[:2]), tuple(samples[2:])
        if len(samples) == 2 and all(isinstance(part, (tuple, list)) or hasattr(part, "read") for part in samples):
            return samples[0], samples[1]
    return samples, None
