"""npz:FILE: arrays in a file of numpy.savez, read without unpickling.

The arrays have the names that Keras' data sets and many others use: x_train, y_train, x_test and y_test; or
train_images, train_labels, val_images, ...; or x and y, of which a share is held out for validation.
"""

import os
import re
import zipfile
import zlib
from pathlib import Path

import numpy as np

from allstep.common.base.errors import UserError, quote, summary
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.base import ArraySplit, Dataset, hold_out
from allstep.common.data.formats.arrays import array_split, joined
from allstep.common.data.formats.parts import PART, UNNAMED, choose_fields, choose_parts
from allstep.common.data.formats.task_inference import describe
from allstep.common.data.passed_over import PassedOver
from allstep.common.files.disk import check_memory, regular
from allstep.common.files.npy import check_header

_MAX_PACKING = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}
"""Largest factor by which the methods of numpy.savez pack; for deflate, see zlib.net/zlib_tech.html."""
_NAME = re.compile(rf"(?:(?P<before>{PART})_)?(?P<field>.+?)(?:_(?P<after>{PART}))?", re.IGNORECASE)


def prepare(config: DataConfig) -> None:
    """Do nothing: the arrays are read directly."""


def load(config: DataConfig) -> Dataset:
    """Read the arrays; every rank reads its own copy.

    Raises UserError if the file is damaged or not a file of numpy.savez, and as `array_split` and `describe` do.
    """
    path = config.path
    assert path is not None  # npz:FILE has a path
    try:
        with open(path, "rb", opener=regular) as stream, zipfile.ZipFile(stream) as archive:
            check_memory(path, 2 * _declared_bytes(archive, os.fstat(stream.fileno()).st_size))
        with np.load(path, allow_pickle=False) as arrays:
            train, validation = _splits(arrays, config, path)
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError) as error:  # the last: encrypted
        raise UserError(
            f"expected arrays of numbers as numpy.savez writes them in {path}, received something else "
            f"({summary(error)}); write it again"
        ) from error
    parts = hold_out(train, validation or train, config, path, has_own=validation is not None)
    return describe(*parts, where=str(path), task=config.task)


def _declared_bytes(archive: zipfile.ZipFile, size: int) -> int:
    """Return the bytes of all members.

    Raises BadZipFile or ValueError if one declares more than can be packed into its part of the file.
    """
    for member in archive.infolist():
        packing = _MAX_PACKING.get(member.compress_type)
        packed = min(member.compress_size, size)
        if packing is None or packed < member.compress_size or member.file_size > packing * (packed + 1):
            raise zipfile.BadZipFile(
                f"{quote(member.filename)} declares {member.file_size} bytes, packed into {member.compress_size} "
                f"of {size}"
            )
    return sum(member.file_size for member in archive.infolist())


def _splits(arrays: np.lib.npyio.NpzFile, config: DataConfig, path: Path) -> tuple[ArraySplit, ArraySplit | None]:
    parts: dict[str, dict[str, str]] = {}
    for key in arrays.files:
        match = _NAME.fullmatch(key)
        assert match  # the field takes whatever the optional groups leave
        part = parts.setdefault((match["before"] or match["after"] or UNNAMED).lower(), {})
        if (other := part.setdefault(match["field"], key)) != key:
            raise UserError(
                f"expected one array of a field and a part in {path}, received {other} and {key}; rename one"
            )
    passed = PassedOver()
    train, validation = choose_parts({name: part.values() for name, part in parts.items()}, passed, "arrays", config)
    where = f"the training part of {path}", f"the part {validation} of {path}"
    splits = (
        _split(arrays, parts[train] if train else {}, config, where[0], passed),
        _split(arrays, parts[validation], config, where[1], passed) if validation else None,
    )
    passed.tell(config.dataset)
    return splits


def _split(
    arrays: np.lib.npyio.NpzFile, keys: dict[str, str], config: DataConfig, where: str, passed: PassedOver
) -> ArraySplit:
    fields, target = choose_fields(keys, config, where, passed)
    columns = [_array(arrays, keys[field]) for field in fields]
    split = array_split(
        columns[0] if len(columns) == 1 else joined(columns, where), _array(arrays, keys[target]), where
    )
    split.fields = (*fields, target)
    return split


def _array(arrays: np.lib.npyio.NpzFile, key: str) -> np.ndarray:
    """Return an array, after its header has been compared with the bytes that follow."""
    assert arrays.zip is not None  # the file is open
    name = key if key in arrays.zip.namelist() else f"{key}.npy"
    try:
        with arrays.zip.open(name) as stream:
            check_header(stream, arrays.zip.getinfo(name).file_size)
        return arrays[key]
    except ValueError as error:
        raise ValueError(f"{quote(key)}: {error}") from error
