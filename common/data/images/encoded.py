"""Splits of encoded images, which are decoded when read, in a thread pool or on a GPU.

Training images are cropped at random and mirrored with probability 1/2; validation images are cropped in the centre.
"""

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
from allstep.common.base.random_state import uniform_draws
from allstep.common.config.data_config import DataConfig
from allstep.common.data.images.crop import NUM_CROP_DRAWS, VECTORS, Box, centre_box, random_resized_box, resampler
from allstep.common.data.images.decoding import Decoder, UnreadableImage, dimensions_on_gpu, is_turned
from allstep.common.data.worker_processes import DecodeProcesses

PACKAGES = {"PIL": "Pillow", "simplejpeg": "simplejpeg"} | ({"cykooz_resizer": "cykooz-resizer"} if VECTORS else {})
"""Modules that decode and resize images, and the packages that contain them."""
# Usual values of ImageNet's training images.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)

MAX_THREADS = 4
"""Maximum number of threads that decode; more than that are processes."""


def prepare_decoding(config: DataConfig) -> None:
    """Make Pillow raise an error for images with too many pixels.

    Raises UserError if a package is not installed.
    """
    for module, package in PACKAGES.items():
        require(module, package, config)
    from PIL.Image import DecompressionBombWarning

    # Pillow only warns about suspiciously many pixels, and its warning does not name the file.
    warnings.simplefilter("error", DecompressionBombWarning)


def require(module: str, package: str, config: DataConfig) -> None:
    """Refuse to go on without a library that only some data sets need."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"expected {package} for --dataset {config.dataset}, received no such package; install it, or choose "
            "another data set"
        ) from error


class EncodedImages(Protocol):
    """Source of a split's images, as the bytes of image files."""

    @property
    def labels(self) -> np.ndarray:
        """Targets: classes, int64 (samples,), or numbers, float32 (samples, numbers)."""
        ...

    def content(self, index: int) -> bytes:
        """Return the bytes of an image. Raises UnreadableImage if there are none."""
        ...

    def name(self, index: int) -> str:
        """Return file and position of an image for error messages."""
        ...


@dataclass(frozen=True)
class EncodedImage:
    """JPEG file for a GPU to decode, with its crop and orientation."""

    content: np.ndarray
    """Bytes of the file, uint8."""
    box: Box
    flipped: bool
    pixels: Callable[[], np.ndarray]
    """Function that decodes on the CPU to uint8 (size, size, 3), for files that the GPU cannot decode."""


class EncodedSplit:
    """Split that decodes images when they are read.

    An unreadable image stops the run. With `skip_unreadable`, it is replaced by the next readable image of its
    class, with the same augmentation, so that every epoch keeps its length and its balance of classes, and is
    the same on any number of ranks.

    With --decode gpu inputs are objects (n,): an `EncodedImage`, or pixels if the GPU cannot decode the file.
    """

    parallel = True

    processes: DecodeProcesses | None = None

    def __init__(self, images: EncodedImages, *, config: DataConfig, pool: ThreadPoolExecutor, augmented: bool) -> None:
        self.images = images
        self.targets = images.labels
        self.class_names, self.fields = getattr(images, "class_names", None), getattr(images, "fields", None)
        self.size = config.image_size
        self.turns = config.exif_orientation
        self.reader = Reader(config.image_size, turns=self.turns)
        self.seed = config.seed
        self.skip_unreadable = config.skip_unreadable
        self.pool = pool
        self.augmented = augmented
        self.for_gpu = config.decode == "gpu"
        self.unreadable: set[int] = set()
        """Images that this rank has failed to read."""

    def __len__(self) -> int:
        return len(self.targets)

    def unreadable_mask(self) -> np.ndarray:
        """Return 1.0 for each image that this rank failed to read, else 0.0: float64 (samples,)."""
        mask = np.zeros(len(self))
        mask[list(self.unreadable)] = 1
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
        if self.processes:
            self.processes.read(self, indices.tolist(), draws, images)
        else:
            for _ in self.pool.map(self.read_one, indices.tolist(), draws, images):
                pass  # The threads write into `images`; this waits for them and re-raises their exceptions.
        return images, self.targets[indices]

    def read_one(self, index: int, draws: list[float], out: np.ndarray) -> None:
        """Write the pixels of one sample into `out`, uint8 (size, size, 3)."""
        box_of, flipped = self._augmentation(draws)
        pixels = self._first_readable(index, box_of)
        if flipped:
            for channel in range(3):  # all channels at once would be slower: NumPy copies runs of only three bytes
                out[..., channel] = pixels[:, ::-1, channel]
        else:
            out[:] = pixels

    def _encoded(self, index: int, draws: list[float]) -> EncodedImage | np.ndarray:
        box_of, flipped = self._augmentation(draws)
        pixels = functools.partial(self._pixels, index, draws)
        try:
            data = self.images.content(index)
        except UnreadableImage:
            return pixels()  # raises an error or finds a replacement
        if (dimensions := dimensions_on_gpu(data)) is None or (self.turns and is_turned(data)):
            return pixels()
        # A writable copy, since PyTorch tensors cannot use read-only memory.
        return EncodedImage(np.frombuffer(bytearray(data), np.uint8), box_of(*dimensions), flipped, pixels)

    def _pixels(self, index: int, draws: list[float]) -> np.ndarray:
        """Return the pixels of one sample, uint8 (size, size, 3)."""
        pixels = np.empty((self.size, self.size, 3), dtype=np.uint8)
        self.read_one(index, draws, pixels)
        return pixels

    def _augmentation(self, draws: list[float]) -> tuple[Callable[[int, int], Box], bool]:
        """Return a function from width and height to the crop box, and whether the image is mirrored."""
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
                        f"({error}); replace it; training skips it with --skip-unreadable"
                    ) from error
                self.unreadable.add(candidate)
        raise UserError(
            f"expected an image that can be read of the class of {self.images.name(index)}, received none; replace them"
        )

    def _others_of_its_class(self, index: int) -> Iterator[int]:
        """Yield the other samples of the same class: first those after `index`, then those before it."""
        labels = self.targets
        same = np.flatnonzero((labels == labels[index]).reshape(len(labels), -1).all(1))
        yield from (*same[same > index].tolist(), *same[same < index].tolist())


def encoded_splits(
    train: EncodedImages, validation: EncodedImages, config: DataConfig
) -> tuple[EncodedSplit, EncodedSplit]:
    """Return both parts of a data set, which share the threads or processes that decode."""
    pool = ThreadPoolExecutor(config.decode_threads, thread_name_prefix="decode")
    splits = (
        EncodedSplit(train, config=config, pool=pool, augmented=True),
        EncodedSplit(validation, config=config, pool=pool, augmented=False),
    )
    number = config.decode_threads or 1
    if number > MAX_THREADS and config.decode != "gpu":
        splits[0].processes = splits[1].processes = DecodeProcesses(splits, number)
    return splits


class Reader(threading.local):
    """Reader of a box of an image at the network's size, with one decoder and one resampler per thread."""

    def __init__(self, size: int, *, turns: bool = False) -> None:
        self.size = size
        self.decoder = Decoder(turns=turns)
        self.resample = resampler(size)

    def read(self, data: bytes, box_of: Callable[[int, int], Box]) -> np.ndarray:
        """Return the pixels of the box, resized to uint8 (size, size, 3).

        Raises UnreadableImage if the bytes are not a readable image.
        """
        return self.resample(*self.decoder.decode(data, box_of, self.size))
