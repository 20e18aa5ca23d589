"""FILE.py:FUNCTION: data returned by a user's function, which is called on every rank.

The function returns arrays: (x_train, y_train, x_validation, y_validation), or ((x_train, y_train), (x_test, y_test))
as Keras' data sets do, or (x, y), of which a share is held out for validation. Or it returns one object or a pair of
objects with `__len__` and `read(indices, epoch)`, or map-style data sets. Or it returns a `Dataset`.
"""

from __future__ import annotations

from typing import Any

from allstep.common.catalog.user_file import call, import_function, parse
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.base import Dataset
from allstep.common.data.formats.map_style import is_map_style
from allstep.common.data.formats.user_samples import as_dataset


def prepare(config: DataConfig) -> None:
    """Do nothing: every rank calls the function."""


def load(config: DataConfig) -> Dataset:
    """Import the file and call the function without arguments.

    Raises UserError if the function does not exist, fails, or returns something else.
    """
    where, file = config.dataset, parse(config.dataset)
    assert file is not None  # --dataset has the form FILE.py:FUNCTION
    samples = call(import_function(*file, "--dataset"), flag="--dataset")
    if isinstance(samples, Dataset):
        return samples
    train, validation = _parts(samples)
    return as_dataset(train, validation, config, where=where)


def _parts(samples: Any) -> tuple[Any, Any]:
    """Return training and validation samples; the latter may be None."""
    if isinstance(samples, (tuple, list)):
        if len(samples) == 4:
            return tuple(samples[:2]), tuple(samples[2:])
        if len(samples) == 2 and all(_is_split(part) for part in samples):
            return samples[0], samples[1]
    return samples, None


def _is_split(part: Any) -> bool:
    return isinstance(part, (tuple, list)) or hasattr(part, "read") or is_map_style(part)
