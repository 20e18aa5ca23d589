"""Data sets written in each format, of numbers or of pictures, with the same samples."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from PIL import Image
from tensorboard.summary.writer.record_writer import RecordWriter

from allstep.common.data.datasets import DataConfig, Dataset, load, prepare

NUM_SAMPLES, NUM_TRAIN = 40, 30
RANDOM = np.random.default_rng(0)
NUMBERS = RANDOM.normal(size=(NUM_SAMPLES, 6)).astype(np.float32)
LABELS = RANDOM.permutation(np.arange(NUM_SAMPLES) % 5)
# One colour per sample, so that the decoded image identifies it after any crop; PNG is lossless.
COLOURS = np.stack([np.arange(NUM_SAMPLES) * 6, LABELS * 50, np.full(NUM_SAMPLES, 99)], 1).astype(np.uint8)
OF_TENSORFLOW = bytes.fromhex(
    "2500000000000000eabc36f30a230a0e0a056c6162656c12051a030a01030a110a0178120c120a0a080000003f000000c0a6735d61"
)
"""Record of x = [0.5, -2.0] and label = [3]."""
TRAIN, VALIDATION = slice(0, NUM_TRAIN), slice(NUM_TRAIN, NUM_SAMPLES)
Write = Callable[[Path, slice], None]


def png(colour: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.broadcast_to(colour, (12, 12, 3)).copy()).save(stream, "PNG")
    return stream.getvalue()


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def message(*fields: tuple[int, bytes]) -> bytes:
    """Encode fields of protobuf's wire type 2, each of fewer than 2^14 bytes."""
    parts = []
    for number, data in fields:
        length = bytes([len(data)]) if len(data) < 128 else bytes([len(data) & 127 | 128, len(data) >> 7])
        parts.append(bytes([number << 3 | 2]) + length + data)
    return b"".join(parts)


def example(**features: bytes | np.ndarray | int) -> bytes:
    def feature(value: bytes | np.ndarray | int) -> bytes:
        if isinstance(value, bytes):
            return message((1, message((1, value))))
        if isinstance(value, int):
            return message((3, message((1, bytes([value])))))
        if value.dtype.kind == "i":  # each below 128, as one byte
            return message((3, message((1, bytes(value.tolist())))))
        return message((2, message((1, value.astype("<f4").tobytes()))))

    entries = [(1, message((1, name.encode()), (2, feature(value)))) for name, value in features.items()]
    return message((1, message(*entries)))


def tfrecord(path: Path, part: slice, *, images: bool) -> None:
    with path.with_suffix(".tfrecord").open("wb") as stream:
        writer = RecordWriter(stream)
        for index in range(NUM_SAMPLES)[part]:
            value = png(COLOURS[index]) if images else NUMBERS[index]
            writer.write(example(image=value, label=int(LABELS[index])))


def webdataset(path: Path, part: slice, *, images: bool) -> None:
    with tarfile.open(path.with_suffix(".tar"), "w") as archive:
        for index in range(NUM_SAMPLES)[part]:
            value = {"png": png(COLOURS[index])} if images else {"npy": npy(NUMBERS[index])}
            add(archive, f"a.folder/{index:03}", **value, cls=str(LABELS[index]).encode(), json=b"{}")


def add(archive: tarfile.TarFile, key: str, **files: bytes) -> None:
    for ending, data in files.items():
        member = tarfile.TarInfo(f"{key}.{ending}")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))


def table(part: slice, *, images: bool) -> pa.Table:
    of_hugging_face = [{"bytes": png(colour), "path": None} for colour in COLOURS[part]]
    return pa.table({"image": of_hugging_face if images else NUMBERS[part].tolist(), "label": LABELS[part]})


def parquet(path: Path, part: slice, *, images: bool) -> None:
    pyarrow.parquet.write_table(table(part, images=images), path.with_suffix(".parquet"), row_group_size=7)


def hf(path: Path, part: slice, *, images: bool) -> None:
    rows = table(part, images=images)
    with path.with_suffix(".arrow").open("wb") as stream, pa.ipc.new_stream(stream, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=7)


WRITERS = {"tfrecord": tfrecord, "webdataset": webdataset, "parquet": parquet, "hf": hf}


def opened(dataset: str, cache: Path, **flags: object) -> Dataset:
    config = DataConfig(dataset, data_dir=cache, image_size=8, decode_threads=2, **flags)  # pyright: ignore
    prepare(config)
    return load(config)
