"""mnist and fashion-mnist: 70,000 grey images of 28x28 pixels in 10 classes, from the original IDX files.

Sources: LeCun, Cortes and Burges, "The MNIST database of handwritten digits", 1998, which also defines the
IDX format; Xiao, Rasul and Vollgraf, "Fashion-MNIST", arXiv:1708.07747.
"""

import gzip
import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.array_cache import archive_errors, check_content_size, load_arrays, prepare_arrays
from allstep.common.data.datasets.base import Dataset
from allstep.common.data.datasets.download import RemoteFile
from allstep.common.files.disk import regular

NUM_CLASSES = 10
IMAGE_SHAPE = (28, 28, 1)
FILE_NAMES = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "validation": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}
# Bytes and SHA-256, in the order of FILE_NAMES.
# From TensorFlow Datasets, url_checksums/mnist.txt and fashion_mnist.txt.
_PUBLISHED = {
    "mnist": (
        (9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        (28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        (1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        (4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    ),
    "fashion-mnist": (
        (26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
        (29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        (4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        (5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    ),
}
FILES = {
    dataset: tuple(
        RemoteFile(name, num_bytes, sha256)
        for name, (num_bytes, sha256) in zip(chain(*FILE_NAMES.values()), published, strict=True)
    )
    for dataset, published in _PUBLISHED.items()
}
MIRRORS = {
    "mnist": (
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
    ),
    "fashion-mnist": (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "https://storage.googleapis.com/tensorflow/tf-keras-datasets",
    ),
}
# Usual values of the training images.
MEAN_STD = {"mnist": (0.1307, 0.3081), "fashion-mnist": (0.2860, 0.3530)}


def prepare(config: DataConfig) -> None:
    """Download the four files and unpack them, as `prepare_arrays` does."""
    prepare_arrays(config, FILES[config.dataset], MIRRORS[config.dataset], unpack)


def load(config: DataConfig) -> Dataset:
    """Open the arrays that `prepare` has unpacked."""
    files, (mean, std) = FILES[config.dataset], MEAN_STD[config.dataset]
    return load_arrays(config, files, image_shape=IMAGE_SHAPE, num_classes=NUM_CLASSES, mean=(mean,), std=(std,))


def unpack(directory: Path) -> dict[str, np.ndarray]:
    """Read the four files in `directory` into arrays, see `array_cache.ARRAY_NAMES`."""
    arrays = {}
    for split, (images_name, labels_name) in FILE_NAMES.items():
        images_path, labels_path = directory / images_name, directory / labels_name
        images, labels = read_idx(images_path, item_shape=IMAGE_SHAPE[:2]), read_idx(labels_path, item_shape=())
        if len(images) != len(labels):
            raise UserError(
                f"expected as many labels in {labels_path} as {images_path} has images, {len(images)}, received "
                f"{len(labels)}"
            )
        if len(labels) == 0:
            raise UserError(f"expected at least one label in {labels_path}, received none")
        if labels.max() >= NUM_CLASSES:
            raise UserError(f"expected labels 0 to {NUM_CLASSES - 1} in {labels_path}, received {labels.max()}")
        arrays[f"{split}_images"] = images[..., None]
        arrays[f"{split}_labels"] = labels.astype(np.int64)
    return arrays


def read_idx(path: Path, *, item_shape: tuple[int, ...]) -> np.ndarray:
    """Read the uint8 array (items, *item_shape) in a gzipped IDX file.

    Raises UserError if the file is truncated, or not an IDX file of uint8 with items of this shape; OSError if the file
    cannot be read, or its content does not fit into the available memory.
    """
    # Two zero bytes, 0x08 for uint8, the number of dimensions; then each dimension as a big-endian uint32.
    num_dimensions = 1 + len(item_shape)
    magic = 0x0800 + num_dimensions
    header_bytes = 4 + 4 * num_dimensions
    with open(path, "rb", opener=regular) as file, archive_errors(path), gzip.open(file) as stream:
        header = stream.read(header_bytes)
        if len(header) < header_bytes:
            raise EOFError(f"a header of {header_bytes} bytes has {len(header)}")
        found, *shape = np.frombuffer(header, dtype=">u4").tolist()
        if found != magic:
            raise UserError(f"expected magic number 0x{magic:08x} in {path}, received 0x{found:08x}")
        if tuple(shape[1:]) != item_shape:
            raise UserError(f"expected images of {_pixels(item_shape)} pixels in {path}, received {_pixels(shape[1:])}")
        num_bytes = math.prod(shape)
        check_content_size(path, num_bytes)
        # One byte more reads to the end, where gzip checks its own checksum.
        content = stream.read(num_bytes + 1)
    if len(content) != num_bytes:
        received = len(content) if len(content) < num_bytes else "more"
        raise UserError(f"expected {num_bytes} bytes for shape {shape} in {path}, received {received}")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _pixels(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
