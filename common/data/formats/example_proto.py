"""Parser for tf.train.Example, the message in TFRecord files; it needs only protobuf, not TensorFlow.

The field numbers are those of tensorflow/core/example/example.proto and feature.proto.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

_REPEATED, _SINGLE = "LABEL_REPEATED", "LABEL_OPTIONAL"
# On the wire, a map is a repeated message with a key and a value.
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


class NotAnExample(ValueError):
    """Bytes that are not a tf.train.Example."""


def parse_example(data: bytes) -> dict[str, bytes | np.ndarray]:
    """Return the features of an Example by name: the first item of a bytes list, or numbers, float32 or int64 (n,).

    Features without a value are left out.

    Raises:
        NotAnExample: the bytes are not a tf.train.Example.
    """
    from google.protobuf.message import DecodeError

    try:
        example = example_class().FromString(data)
    except DecodeError as error:
        raise NotAnExample(str(error)) from error
    features: dict[str, bytes | np.ndarray] = {}
    for entry in example.features.feature:
        value = entry.value
        name = entry.key.decode(errors="replace")
        if value.bytes_list.value:
            features[name] = value.bytes_list.value[0]
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
