"""webdataset:DIR: tar archives; a sample is a group of consecutive files whose names differ only in the extension.

    0001.jpg 0001.cls 0002.jpg 0002.cls ...

An input is a JPEG or PNG file, or an array (x.npy); a target is a number as text (.cls), or an array (y.npy).
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.base import Dataset
from allstep.common.data.formats.indexed import Damaged, SampleFormat, load_indexed, located, prepare_indexes
from allstep.common.data.formats.parts import choose_fields
from allstep.common.data.formats.sample_index import Located
from allstep.common.data.images.decoding import MAX_FILE_BYTES
from allstep.common.files.regular_file import regular

_NPY = b"\x93NUMPY"


def prepare(config: DataConfig) -> None:
    """Build the indexes of the archives."""
    prepare_indexes(config, _FORMAT)


def load(config: DataConfig) -> Dataset:
    """Open the indexes of the archives."""
    return load_indexed(config, _FORMAT)


def _scan(path: Path, config: DataConfig) -> Iterator[Located]:
    with open(path, "rb", opener=regular) as stream:
        try:
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                for key, members in groupby(_files(archive), key=_key):
                    yield _sample(archive, {_ending(member): member for member in members}, f"{path}, {key}", config)
        except tarfile.TarError as error:
            raise UserError(
                f"expected a whole tar archive, not compressed, in {path}, received something else: {error}; write it "
                "again"
            ) from error


def _files(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    while (member := archive.next()) is not None:
        if member.isfile():
            yield member


def _key(member: tarfile.TarInfo) -> str:
    """Return the name up to the first dot after the last slash, as WebDataset does."""
    folder, slash, name = member.name.rpartition("/")
    return folder + slash + name.partition(".")[0]


def _ending(member: tarfile.TarInfo) -> str:
    return member.name.rpartition("/")[2].partition(".")[2].lower()


def _sample(archive: tarfile.TarFile, members: dict[str, tarfile.TarInfo], where: str, config: DataConfig) -> Located:
    names, target = choose_fields(members, config, where)
    name, *more = names
    if more:
        raise UserError(f"expected one name after --input-fields for {where}, received {len(names)}; name one")
    both = members[name], members[target]
    if (size := max(member.size for member in both)) > MAX_FILE_BYTES:
        raise UserError(f"expected files of at most {MAX_FILE_BYTES} bytes, received {size} in {where}; leave it out")
    value = _value(archive, both[0], where) if name.endswith("npy") else None
    sample = located(both[0].offset_data, both[0].size, value, _value(archive, both[1], where), where)
    if sample.target is not None:
        return sample
    # The range from the header of the first file to the last block of the second is an archive itself.
    begin = min(member.offset for member in both)
    end = max(member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE for member in both)
    return replace(sample, offset=begin, length=end - begin)


def _value(archive: tarfile.TarFile, member: tarfile.TarInfo, where: str) -> object:
    """Return the content of a file: an array, a number, or bytes if it is neither."""
    data = _content(archive, member)
    if data.startswith(_NPY):
        try:
            return _array(data)
        except Damaged as error:
            raise UserError(f"expected an array in {where}, {member.name}, received {error}; write it again") from error
    text = data.decode(errors="replace").strip()
    try:
        return np.array(int(text))
    except ValueError:
        try:
            return np.array(float(text))
        except ValueError:
            return data


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = archive.extractfile(member)
    assert stream is not None  # `member` is a file
    return stream.read()


def _input_of(data: bytes, config: DataConfig) -> bytes | np.ndarray:
    return _array(data) if data.startswith(_NPY) else data


def _tokens_of(data: bytes, config: DataConfig) -> np.ndarray:
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            members = {_ending(member): member for member in _files(archive)}
            (name,), target = choose_fields(members, config, "a sample")
            return np.stack([_array(_content(archive, members[field])) for field in (name, target)])
    except (tarfile.TarError, ValueError) as error:
        raise Damaged(error) from error


def _array(data: bytes) -> np.ndarray:
    try:
        array = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise Damaged(f"no .npy file of numbers ({error})") from error
    if array.dtype.kind not in "biuf":
        raise Damaged(f"an array of {array.dtype}")
    return array


_FORMAT = SampleFormat((".tar",), _scan, _input_of, _tokens_of)
