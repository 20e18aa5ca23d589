"""tfrecord:DIR: tf.train.Example records in TFRecord files, read without TensorFlow.

A record has 8 bytes of length, 4 bytes of checksum of the length, the message, and 4 bytes of checksum of the message
(CRC-32C, masked; tensorflow/core/lib/io/record_writer.h). Building the index checks both, reading a sample checks that
of the message. An input is an image file, or numbers; a target is a class, numbers, or the tokens that follow.
"""

import functools
import os
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.base import Dataset
from allstep.common.data.datasets.files import with_packed
from allstep.common.data.formats.arrays import joined
from allstep.common.data.formats.indexed import Damaged, SampleFormat, load_indexed, located, prepare_indexes
from allstep.common.data.formats.parts import choose_fields
from allstep.common.data.formats.sample_index import Located
from allstep.common.data.images.decoding import MAX_FILE_BYTES
from allstep.common.data.images.encoded import require
from allstep.common.data.passed_over import PassedOver
from allstep.common.files.disk import regular

_REPEATED, _SINGLE = "LABEL_REPEATED", "LABEL_OPTIONAL"
# Messages of tensorflow/core/example/example.proto and feature.proto, with the numbers of their fields. On the wire, a
# map is a repeated message with a key and a value.
_MESSAGES = {
    "BytesList": [("value", 1, "TYPE_BYTES", _REPEATED)],
    "FloatList": [("value", 1, "TYPE_FLOAT", _REPEATED)],
    "Int64List": [("value", 1, "TYPE_INT64", _REPEATED)],
    "Feature": [
        ("bytes_list", 1, "BytesList", _SINGLE),
        ("float_list", 2, "FloatList", _SINGLE),
        ("int64_list", 3, "Int64List", _SINGLE),
    ],
    "Entry": [("key", 1, "TYPE_BYTES", _SINGLE), ("value", 2, "Feature", _SINGLE)],
    "Features": [("feature", 1, "Entry", _REPEATED)],
    "Example": [("features", 1, "Features", _SINGLE)],
}


def parse_example(data: bytes) -> dict[str, bytes | np.ndarray]:
    """Return the features of an Example by name: bytes, several as objects (n,), or numbers, float32 or int64 (n,).

    Features without a value are left out. Raises Damaged if the bytes are not a tf.train.Example.
    """
    from google.protobuf.message import DecodeError

    try:
        example = example_class().FromString(data)
    except DecodeError as error:
        raise Damaged(f"it is no tf.train.Example ({error})") from error
    features: dict[str, bytes | np.ndarray] = {}
    for entry in example.features.feature:
        value = entry.value
        name = entry.key.decode(errors="replace")
        if value.bytes_list.value:
            first, *more = value.bytes_list.value
            features[name] = np.array([first, *more], object) if more else first
        elif value.float_list.value:
            # The serialized list ends with the packed floats; copying them one by one takes a hundred times as long.
            packed = value.float_list.SerializeToString()
            features[name] = np.frombuffer(packed[-4 * len(value.float_list.value) :], "<f4")
        elif value.int64_list.value:
            features[name] = np.array(value.int64_list.value, np.int64)
    return features


@functools.cache
def example_class() -> Any:
    """Return the message class, which protobuf generates from its description."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field_type = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="allstep/example.proto", package="allstep", syntax="proto3")
    for name, members in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, label in members:
            new = message.field.add(name=field, number=number, label=getattr(field_type, label))
            if kind in _MESSAGES:
                new.type, new.type_name = field_type.TYPE_MESSAGE, f".allstep.{kind}"
            else:
                new.type = getattr(field_type, kind)
    pool = descriptor_pool.DescriptorPool()  # a separate pool, since TensorFlow's messages may be in the default one
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("allstep.Example"))


_HEADER, _CHECKSUM = struct.Struct("<QI"), struct.Struct("<I")


def prepare(config: DataConfig) -> None:
    """Build the indexes of the files."""
    require("google_crc32c", "google-crc32c", config)
    prepare_indexes(config, _FORMAT)


def load(config: DataConfig) -> Dataset:
    """Open the indexes of the files."""
    require("google_crc32c", "google-crc32c", config)
    return load_indexed(config, _FORMAT)


def _scan(path: Path, config: DataConfig, passed: PassedOver) -> Iterator[Located]:
    with open(path, "rb", opener=regular) as stream:
        size, offset = os.fstat(stream.fileno()).st_size, 0
        while offset < size:
            where = f"{path}, byte {offset}"
            try:
                length = _length(stream.read(_HEADER.size), size - offset)
                message = stream.read(length + _CHECKSUM.size)
                features = _features(message)
            except Damaged as error:
                raise UserError(
                    f"expected a whole record in {where}, received a damaged one: {error}; write the file again"
                ) from error
            if not offset:  # a record without a value for one of them is refused, whatever else it has
                names, label = choose_fields(features, config, where, passed)
                config = replace(config, input_fields=names, target_field=label)
            value, target = _sample(features, config, where)
            sample = located(offset + _HEADER.size, len(message), value, target, where)
            yield replace(sample, checksum=_CHECKSUM.unpack_from(message, length)[0])
            offset += _HEADER.size + length + _CHECKSUM.size


def _length(header: bytes, num_left: int) -> int:
    """Return the length of the message that follows a header."""
    if len(header) < _HEADER.size:
        raise Damaged("the file ends in its header")
    length, checksum = _HEADER.unpack(header)
    if checksum != _masked_crc(header[:8]):
        raise Damaged("the checksum of its length is wrong")
    if length > MAX_FILE_BYTES or length > num_left - _HEADER.size - _CHECKSUM.size:
        raise Damaged(f"it says {length} bytes, and the file ends before")
    return length


def _features(data: bytes) -> dict[str, bytes | np.ndarray]:
    """Return the features in a message, after comparing its checksum."""
    message, checksum = data[: -_CHECKSUM.size], data[-_CHECKSUM.size :]
    if _CHECKSUM.unpack(checksum)[0] != _masked_crc(message):
        raise Damaged("its checksum is wrong")
    return parse_example(message)


def _masked_crc(data: bytes) -> int:
    from google_crc32c import value

    crc = value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _sample(features: dict[str, bytes | np.ndarray], config: DataConfig, where: str) -> tuple[Any, Any]:
    """Return input and target of a sample."""
    names, target = choose_fields(features, config, where, PassedOver())
    values = [features[name] for name in names]
    return values[0] if len(values) == 1 else joined([[value] for value in values], where)[0], features[target]


def _input_of(data: bytes, config: DataConfig) -> bytes | np.ndarray:
    value, _ = _sample(_features(data), config, "a record")
    return value


def _tokens_of(data: bytes, config: DataConfig) -> np.ndarray:
    return np.stack(_sample(_features(data), config, "a record"))


_FORMAT = SampleFormat(with_packed(".tfrecord", ".tfrecords", ".tfrec"), _scan, _input_of, _tokens_of)
