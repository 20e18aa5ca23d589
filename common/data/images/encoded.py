"""Images that are decoded when they are read, in a pool of threads or on a GPU, wherever their bytes lie.

Training images are cropped at random and mirrored every other time; validation images are cropped in the centre.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.hashing import uniform_draws
from allstep.common.data.images.crop import NUM_CROP_DRAWS, Box, centre_box, random_resized_box
from allstep.common.data.images.decoding import Decoder, UnreadableImage, dimensions_on_gpu
from allstep.common.data.images.resampling import VECTORS, resampler

PACKAGES = {"PIL": "Pillow", "simplejpeg": "simplejpeg"} | ({"cykooz_resizer": "cykooz-resizer"} if VECTORS else {})
"""What decodes and resizes: modules, and what to install."""
# Of ImageNet's training images, as usually given.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def prepare_decoding(config: DataConfig) -> None:
    """Look whether images can be decoded, and have an image of too many pixels count as unreadable.

    Raises:
        UserError: a package is not installed, or a flag is out of range.
    """
    for module, package in PACKAGES.items():
        require(module, package, config)
    for name, value in (("--image-size", config.image_size), ("--decode-threads", config.decode_threads)):
        if value is not None and value < 1:
            raise UserError(f"expected {name} to be at least 1, received {value}")
    from PIL.Image import DecompressionBombWarning

    # Pillow's warning about an image of so many pixels that it doubts them would not name the file.
    warnings.simplefilter("error", DecompressionBombWarning)


def require(module: str, package: str, config: DataConfig) -> None:
    """Look whether a library is installed that not every data set needs.

    Raises:
        UserError: it is not.
    """
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"expected {package} for --dataset {config.dataset}, received no such package; install it, or choose "
            "another data set"
        ) from error


class EncodedImages(Protocol):
    """Where a split's images lie, as the bytes of JPEG and PNG files."""

    @property
    def labels(self) -> np.ndarray:
        """The targets: int64 (samples,), the classes, or float32 (samples, numbers)."""
        ...

    def content(self, index: int) -> bytes:
        """The bytes of an image; raises UnreadableImage where there are none."""
        ...

    def name(self, index: int) -> str:
        """The file, and what in it, for messages."""
        ...


@dataclass(frozen=True)
class EncodedImage:
    """A JPEG file that a GPU is to decode, and what of it the network sees."""

    content: np.ndarray
    """Its bytes, uint8."""
    box: Box
    flipped: bool
    pixels: Callable[[], np.ndarray]
    """The same by the CPU, uint8 (size, size, 3), for a file that the GPU cannot decode."""


class EncodedSplit:
    """Decodes images as they are asked for.

    An image that cannot be read stops the run. With `skip_unreadable`, the next readable one of its class
    takes its place, under the augmentation of the first, so that every epoch keeps its length and its balance
    of classes, and stays the same on any number of ranks.

    With --decode gpu inputs are objects (n,): an `EncodedImage` or, of what is no JPEG for a GPU, the pixels.
    """

    parallel = True

    def __init__(self, images: EncodedImages, *, config: DataConfig, pool: ThreadPoolExecutor, augmented: bool) -> None:
        self.images = images
        self.targets = images.labels
        self.size = config.image_size
        self.reader = Reader(config.image_size)
        self.seed = config.seed
        self.skip_unreadable = config.skip_unreadable
        self.pool = pool
        self.augmented = augmented
        self.for_gpu = config.decode == "gpu"
        self._unreadable: set[int] = set()

    def __len__(self) -> int:
        return len(self.targets)

    def unreadable_mask(self) -> np.ndarray:
        """1.0 for each image that this rank has tried to read and could not, else 0.0: float64 (samples,)."""
        mask = np.zeros(len(self))
        mask[list(self._unreadable)] = 1
        return mask

    def read(self, indices: np.ndarray, *, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        indices = np.asarray(indices)
        draws = uniform_draws(indices, NUM_CROP_DRAWS + 1, seed=self.seed, epoch=epoch).tolist()
        if self.for_gpu:
            objects = np.empty(len(indices), dtype=object)
            for number, image in enumerate(self.pool.map(self._encoded, indices.tolist(), draws)):
                objects[number] = image
            return objects, self.targets[indices]
        images = np.empty((len(indices), self.size, self.size, 3), dtype=np.uint8)
        tasks = self.pool.map(self._read_one, indices.tolist(), draws, images)
        for _ in tasks:
            pass  # The pixels are in place; this waits, and raises what a thread has raised.
        return images, self.targets[indices]

    def _read_one(self, index: int, draws: list[float], out: np.ndarray) -> None:
        """Writes the pixels of one sample into `out`, uint8 (size, size, 3)."""
        box_of, flipped = self._augmentation(draws)
        pixels = self._first_readable(index, box_of)
        if flipped:
            for channel in range(3):  # in one go NumPy would copy pixel by pixel, three bytes each
                out[..., channel] = pixels[:, ::-1, channel]
        else:
            out[:] = pixels

    def _encoded(self, index: int, draws: list[float]) -> EncodedImage | np.ndarray:
        box_of, flipped = self._augmentation(draws)
        pixels = functools.partial(self._pixels, index, draws)
        try:
            data = self.images.content(index)
        except UnreadableImage:
            return pixels()  # it says what is to be done about that
        if (dimensions := dimensions_on_gpu(data)) is None:
            return pixels()
        # A copy: PyTorch's tensors have no memory that cannot be written.
        return EncodedImage(np.frombuffer(bytearray(data), np.uint8), box_of(*dimensions), flipped, pixels)

    def _pixels(self, index: int, draws: list[float]) -> np.ndarray:
        """uint8 (size, size, 3)"""
        pixels = np.empty((self.size, self.size, 3), dtype=np.uint8)
        self._read_one(index, draws, pixels)
        return pixels

    def _augmentation(self, draws: list[float]) -> tuple[Callable[[int, int], Box], bool]:
        """The box of an image of a width and height, and whether it is mirrored."""
        *crop_draws, flip_draw = draws
        if self.augmented:
            return functools.partial(random_resized_box, draws=crop_draws), flip_draw < 0.5
        return centre_box, False

    def _first_readable(self, index: int, box_of: Callable[[int, int], Box]) -> np.ndarray:
        for candidate in itertools.chain([index], self._others_of_its_class(index)):
            try:
                return self.reader.read(self.images.content(candidate), box_of)
            except UnreadableImage as error:
                if not self.skip_unreadable:
                    raise UserError(
                        f"expected an image in {self.images.name(candidate)}, received what cannot be read as one "
                        f"({error}); replace it, or give --skip-unreadable"
                    ) from error
                self._unreadable.add(candidate)
        raise UserError(
            f"expected an image that can be read of the class of {self.images.name(index)}, received none; replace them"
        )

    def _others_of_its_class(self, index: int) -> Iterator[int]:
        """Those after it, then those before it."""
        labels = self.targets
        same = np.flatnonzero((labels == labels[index]).reshape(len(labels), -1).all(1))
        yield from (*same[same > index].tolist(), *same[same < index].tolist())


class Reader(threading.local):
    """Reads a box of an image at the network's size; every thread has a decoder and a resampler of its own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.decoder = Decoder()
        self.resample = resampler(size)

    def read(self, data: bytes, box_of: Callable[[int, int], Box]) -> np.ndarray:
        """uint8 (size, size, 3)

        Raises:
            UnreadableImage: the bytes are no image that can be read.
        """
        return self.resample(*self.decoder.decode(data, box_of, self.size))
