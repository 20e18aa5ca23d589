"""npz:FILE: arrays in a file of numpy.savez, read without unpickling.

The arrays have the names that Keras' data sets and many others use: x_train, y_train, x_test and y_test; or
train_images, train_labels, val_images, ...; or x and y, of which a share is held out for validation.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from pathlib import Path

import numpy as np

from allstep.common.base.errors import UserError, summary
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.base import ArraySplit, Dataset
from allstep.common.data.datasets.subset import hold_out
from allstep.common.data.formats.arrays import array_split
from allstep.common.data.formats.parts import VALIDATION_NAMES, choose_fields
from allstep.common.data.formats.task_inference import describe
from allstep.common.files.regular_file import check_memory, regular

_PART = "|".join(("train", *VALIDATION_NAMES))
_NAME = re.compile(rf"(?:(?P<before>{_PART})_)?(?P<field>.+?)(?:_(?P<after>{_PART}))?")


def prepare(config: DataConfig) -> None:
    """Do nothing: the arrays are read directly."""


def load(config: DataConfig) -> Dataset:
    """Read the arrays; every rank reads its own copy.

    Raises:
        UserError: the file is damaged or not a file of numpy.savez, or see `array_split` and `describe`.
    """
    path = config.path
    assert path is not None  # npz:FILE has a path
    try:
        with open(path, "rb", opener=regular) as stream, zipfile.ZipFile(stream) as archive:
            check_memory(path, 2 * sum(member.file_size for member in archive.infolist()))
        with np.load(path, allow_pickle=False) as arrays:
            train, validation = _splits(arrays, config, path)
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
        raise UserError(
            f"expected arrays of numbers as numpy.savez writes them in {path}, received something else "
            f"({summary(error)}); write it again"
        ) from error
    if validation is None:
        train, validation = hold_out(train, train, share=config.validation_share, seed=config.seed, where=str(path))
    return describe(train, validation, where=str(path))


def _splits(arrays: np.lib.npyio.NpzFile, config: DataConfig, path: Path) -> tuple[ArraySplit, ArraySplit | None]:
    parts: dict[str, dict[str, str]] = {}
    for key in arrays.files:
        match = _NAME.fullmatch(key)
        assert match  # the field takes whatever the optional groups leave
        parts.setdefault(match["before"] or match["after"] or "", {})[match["field"]] = key
    train = _split(arrays, parts.get("train") or parts.get("", {}), config, f"the training part of {path}")
    name = next((name for name in VALIDATION_NAMES if name in parts), None)
    return train, _split(arrays, parts[name], config, f"the part {name} of {path}") if name else None


def _split(arrays: np.lib.npyio.NpzFile, keys: dict[str, str], config: DataConfig, where: str) -> ArraySplit:
    fields, target = choose_fields(keys, config, where)
    columns = [arrays[keys[field]] for field in fields]
    return array_split(columns[0] if len(columns) == 1 else np.stack(columns, 1), arrays[keys[target]], where)
