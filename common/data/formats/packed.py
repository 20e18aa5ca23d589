"""Compressed files of samples, such as .tar.gz: unpacked once per host, since samples are read in any order."""

import bz2
import dataclasses
import gzip
import lzma
import shutil
import zlib
from pathlib import Path

from allstep.common.base.errors import UserError, summary
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.files import derive_once, derived, derived_file
from allstep.common.files.disk import write_atomically
from allstep.common.files.regular_file import regular

_OPENERS = {b"\x1f\x8b\x08": gzip.open, b"BZh": bz2.open, b"\xfd7z": lzma.open}
_ENDINGS = (".gz", ".bz2", ".xz")


def with_packed(*suffixes: str) -> tuple[str, ...]:
    """Return suffixes of files, and those of the same files when they are compressed."""
    return (*suffixes, *(suffix + ending for suffix in suffixes for ending in _ENDINGS))


def unpack_once(path: Path, config: DataConfig) -> None:
    """Unpack a file if it is compressed, unless another run has done so. Raises UserError if the file is damaged."""
    with open(path, "rb", opener=regular) as stream:
        opener = _OPENERS.get(stream.read(3))
        if opener is None:
            return
        stream.seek(0)

        def unpack(target: Path) -> None:
            with opener(stream) as source, write_atomically(target) as plain:
                shutil.copyfileobj(source, plain, 2**20)

        try:
            derive_once(_target(path, config), unpack)
        except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError, ValueError) as error:
            raise UserError(
                f"expected a whole file in {path}, received a damaged one ({summary(error)}); write it again"
            ) from error


def unpacked(path: Path, config: DataConfig) -> Path:
    """Return the path itself, or that of the file that `unpack_once` has written.

    Raises UserError if the unpacked file is missing.
    """
    with open(path, "rb", opener=regular) as stream:
        if stream.read(3) not in _OPENERS:
            return path
    return derived(_target(path, config))


def _target(path: Path, config: DataConfig) -> Path:
    return derived_file([path], dataclasses.replace(config, input_fields=(), target_field=None), ".unpacked")
