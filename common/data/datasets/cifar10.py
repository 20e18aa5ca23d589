"""cifar10: 60,000 colour images of 32x32 pixels in 10 classes, from the binary archive.

Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
"""

import gzip
import tarfile
from pathlib import Path
from typing import IO, cast

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.array_cache import (
    Bounded,
    archive_errors,
    check_content_size,
    load_arrays,
    prepare_arrays,
)
from allstep.common.data.datasets.base import Dataset
from allstep.common.data.datasets.download import RemoteFile
from allstep.common.files.disk import regular

NUM_CLASSES = 10
IMAGE_SHAPE = (32, 32, 3)
RECORD_BYTES = 1 + 3 * 32 * 32
"""Size of a record: a label, then the red, the green and the blue plane."""

ARCHIVE = "cifar-10-binary.tar.gz"
# Size and SHA-256 are those of TensorFlow Datasets (url_checksums/cifar10.txt).
FILES = (RemoteFile(ARCHIVE, 170052171, "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"),)
# Usual values of the training images.
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
MIRRORS = ("https://www.cs.toronto.edu/~kriz",)
MEMBERS = {
    "train": tuple(f"cifar-10-batches-bin/data_batch_{number}.bin" for number in range(1, 6)),
    "validation": ("cifar-10-batches-bin/test_batch.bin",),
}


def prepare(config: DataConfig) -> None:
    """Download the archive and unpack it, as `prepare_arrays` does."""
    prepare_arrays(config, FILES, MIRRORS, lambda directory: unpack(directory / ARCHIVE))


def load(config: DataConfig) -> Dataset:
    """Open the arrays that `prepare` has unpacked."""
    return load_arrays(config, FILES, image_shape=IMAGE_SHAPE, num_classes=NUM_CLASSES, mean=MEAN, std=STD)


def unpack(archive: Path) -> dict[str, np.ndarray]:
    """Read the archive into arrays, see `array_cache.ARRAY_NAMES`, without extracting files to disk."""
    wanted = {name for names in MEMBERS.values() for name in names}
    contents: dict[str, bytes] = {}
    with (
        open(archive, "rb", opener=regular) as file,
        archive_errors(archive),
        gzip.open(file) as stream,
        # Mode r| only calls read().
        tarfile.open(fileobj=cast("IO[bytes]", Bounded(archive, stream)), mode="r|") as tar,
    ):
        # In the archive's order, since going back would decompress it from the start again.
        for member in tar:
            if member.isfile() and member.name in wanted:
                check_content_size(archive, member.size)
                content = tar.extractfile(member)
                assert content is not None  # it is a file
                contents[member.name] = content.read()
    if missing := wanted - contents.keys():
        raise UserError(f"expected a file {min(missing)} in {archive}, received none")

    arrays = {}
    for split, names in MEMBERS.items():
        parts = [_parse(contents[name], f"{archive}, {name}") for name in names]
        arrays[f"{split}_images"] = np.concatenate([images for images, _ in parts])
        arrays[f"{split}_labels"] = np.concatenate([labels for _, labels in parts])
    return arrays


def _parse(content: bytes, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels of one file of records."""
    if not content or len(content) % RECORD_BYTES:
        raise UserError(f"expected records of {RECORD_BYTES} bytes in {name}, received {len(content)} bytes")
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, RECORD_BYTES)
    labels = records[:, 0].astype(np.int64)
    if labels.max() >= NUM_CLASSES:
        raise UserError(f"expected labels 0 to {NUM_CLASSES - 1} in {name}, received {labels.max()}")
    planes = records[:, 1:].reshape(-1, 3, 32, 32)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels
