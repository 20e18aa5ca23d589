"""webdataset:DIR: tar archives; a sample is a group of consecutive files whose names differ only in the extension.

    0001.jpg 0001.cls 0002.jpg 0002.cls ...

An input is an image file, or an array (x.npy); a target is a number or a name as text (.cls), or an array (y.npy).
Hidden files, links and devices are passed over, and counted.
"""

import io
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np

from allstep.common.base.errors import UserError, quote
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.base import Dataset
from allstep.common.data.datasets.files import with_packed
from allstep.common.data.formats.indexed import Damaged, SampleFormat, load_indexed, located, prepare_indexes
from allstep.common.data.formats.parts import HIDDEN, TARGET_NAMES, choose_fields, is_hidden
from allstep.common.data.formats.sample_index import Located
from allstep.common.data.images.decoding import MAX_FILE_BYTES
from allstep.common.data.passed_over import PassedOver
from allstep.common.files import strict_json
from allstep.common.files.disk import regular
from allstep.common.files.npy import load_npy

_NPY = b"\x93NUMPY"
_WHOLE = re.compile("[-+]?[0-9]{1,18}")


def prepare(config: DataConfig) -> None:
    """Build the indexes of the archives."""
    prepare_indexes(config, _FORMAT)


def load(config: DataConfig) -> Dataset:
    """Open the indexes of the archives."""
    return load_indexed(config, _FORMAT)


def _scan(path: Path, config: DataConfig, passed: PassedOver) -> Iterator[Located]:
    with open(path, "rb", opener=regular, buffering=0) as stream:
        size = os.fstat(stream.fileno()).st_size
        try:
            with tarfile.open(fileobj=_Finite(stream), mode="r:") as archive:
                for key, group in groupby(_files(archive, size, passed), key=_key):
                    members = list(group)
                    where, by_ending = f"{path}, {key}", {_ending(member): member for member in members}
                    if len(by_ending) < len(members):
                        raise UserError(
                            f"expected files with several endings in {where}, received {len(members)} with the endings "
                            f"{', '.join(sorted(by_ending))}; give each sample a name of its own"
                        )
                    yield _sample(archive, by_ending, where, config, passed)
                _check_end(stream, archive.offset, path, passed)
        except (tarfile.TarError, OverflowError, ValueError, OSError) as error:
            raise UserError(
                f"expected a whole tar archive in {path}, received something else: {error}; write it again"
            ) from error


def _check_end(stream: io.RawIOBase, offset: int, path: Path, passed: PassedOver) -> None:
    """Check that zeros end an archive: tarfile stops at a damaged header, and before another archive, without a word.

    Raises TarError if something else follows.
    """
    stream.seek(offset)
    rest = stream.read(tarfile.BLOCKSIZE)
    if not rest:
        passed.add("what may have followed in archives without an end", path.name)
    while rest:
        if rest.strip(b"\0"):
            raise tarfile.ReadError(f"{os.fstat(stream.fileno()).st_size - offset} bytes after its end at {offset}")
        rest = stream.read(2**20)


class _Finite(io.BufferedReader):
    """A stream that allocates no more for a read than its file has left, whatever a header declares."""

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, os.fstat(self.fileno()).st_size - self.tell())
        return super().read(left if size is None or size < 0 else min(size, left))


def _files(archive: tarfile.TarFile, size: int, passed: PassedOver) -> Iterator[tarfile.TarInfo]:
    """Yield the files of an archive of `size` bytes, and note in `passed` what is passed over.

    Raises TarError if a file declares more than the archive has.
    """
    while (member := archive.next()) is not None:
        if is_hidden(member.name):
            passed.add(f"{HIDDEN} in archives", member.name)
        elif not member.isfile() or member.issparse():
            if not member.isdir():
                passed.add("links, devices and sparse files in archives", member.name)
        elif member.offset_data + member.size > size:
            raise tarfile.ReadError(f"{quote(member.name)} declares {member.size} bytes, which are not there")
        elif not _ending(member):
            passed.add("files without an ending in archives", member.name)
        else:
            yield member


def _key(member: tarfile.TarInfo) -> str:
    """Return the name up to the first dot after the last slash, as WebDataset does."""
    folder, slash, name = member.name.rpartition("/")
    return folder + slash + name.partition(".")[0]


def _ending(member: tarfile.TarInfo) -> str:
    return member.name.rpartition("/")[2].partition(".")[2].lower()


def _sample(
    archive: tarfile.TarFile, members: dict[str, tarfile.TarInfo], where: str, config: DataConfig, passed: PassedOver
) -> Located:
    try:
        names, target = choose_fields(members, config, where, passed)
    except UserError:
        if not (inside := _targets_in_json(archive, members, config)):
            raise
        names, target = choose_fields([*(members.keys() - {"json"}), *inside], config, where, passed)
    name, *more = names
    if more:
        raise UserError(f"expected one name after --input-fields for {where}, received {len(names)}; name one")
    both = members[name], members[target if target in members else "json"]
    if (size := max(member.size for member in both)) > MAX_FILE_BYTES:
        raise UserError(f"expected files of at most {MAX_FILE_BYTES} bytes, received {size} in {where}; leave it out")
    value = _value(archive, both[0], where) if name.endswith("npy") else None
    given = _value(archive, both[1], where) if target in members else inside[target]
    sample = located(both[0].offset_data, both[0].size, value, given, where)
    if sample.target is not None:
        return sample
    # The range from the header of the first file to the last block of the second is an archive itself.
    begin = min(member.offset for member in both)
    end = max(member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE for member in both)
    return replace(sample, offset=begin, length=end - begin)


def _targets_in_json(
    archive: tarfile.TarFile, members: dict[str, tarfile.TarInfo], config: DataConfig
) -> dict[str, object]:
    """Return the targets in a sample's JSON file; a list as fractions, since it is no tokens."""
    try:
        found = strict_json.loads(_content(archive, members["json"]))
        return {
            key: value.encode()
            if isinstance(value := found[key], str)
            else np.array(value, float if type(value) is list else None)
            for key in {config.target_field, *TARGET_NAMES} & {*found}
        }
    except (KeyError, ValueError, TypeError):  # no JSON, no object, or lists of something else than numbers
        return {}


def _value(archive: tarfile.TarFile, member: tarfile.TarInfo, where: str) -> object:
    """Return the content of a file: an array, a number, or bytes if it is neither."""
    data = _content(archive, member)
    if data.startswith(_NPY):
        try:
            return _array(data)
        except Damaged as error:
            raise UserError(f"expected an array in {where}, {member.name}, received {error}; write it again") from error
    text = data.decode("utf-8-sig", errors="replace").strip()
    if _WHOLE.fullmatch(text):
        return np.array(int(text))
    try:
        return np.array(float(text.replace("_", "?")))  # 1_2 is a name
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
            members = {_ending(member): member for member in _files(archive, len(data), PassedOver())}
            (name,), target = choose_fields(members, config, "a sample", PassedOver())
            return np.stack([_array(_content(archive, members[field])) for field in (name, target)])
    except (tarfile.TarError, ValueError) as error:
        raise Damaged(error) from error


def _array(data: bytes) -> np.ndarray:
    try:
        array = load_npy(data)
    except (ValueError, EOFError) as error:
        raise Damaged(f"no .npy file of numbers ({error})") from error
    if array.dtype.kind not in "biuf":
        raise Damaged(f"an array of {array.dtype}")
    return array


_FORMAT = SampleFormat((*with_packed(".tar"), ".tgz", ".tbz2", ".txz"), _scan, _input_of, _tokens_of)
