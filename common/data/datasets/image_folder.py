"""image-folder: JPEG and PNG files in train/CLASS/ and val/CLASS/, as ImageNet is laid out.

Classes are numbered in the order of their names. Files of other types, hidden ones and what lies deeper are
passed over; symbolic links are followed. Images are decoded when they are read, in a pool of threads.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from allstep.common.data.datasets.augment import NUM_CROP_DRAWS, Box, centre_box, random_resized_box
from allstep.common.data.datasets.base import Dataset
from allstep.common.data.datasets.config import DataConfig
from allstep.common.data.datasets.decoding import Decoder, UnreadableImage
from allstep.common.data.datasets.hashing import uniform_draws
from allstep.common.data.datasets.resampling import VECTORS, resampler
from allstep.common.process.errors import UserError

PACKAGES = {"PIL": "Pillow", "simplejpeg": "simplejpeg"} | ({"cykooz_resizer": "cykooz-resizer"} if VECTORS else {})
"""What decodes and resizes: modules, and what to install."""
SUFFIXES = (".jpg", ".jpeg", ".png")
# Of ImageNet's training images, as usually given.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def prepare(config: DataConfig) -> None:
    """Looks at the folders as `load` does, so that a mistake is reported by one rank alone."""
    load(config)


def load(config: DataConfig) -> Dataset:
    """Lists the files; decodes none.

    Raises:
        UserError: a package is not installed, a flag is out of range, a folder is missing, a class has no image,
            or train/ and val/ differ in their classes.
    """
    for package in PACKAGES:
        _require(package)
    for name, value in (("--image-size", config.image_size), ("--decode-threads", config.decode_threads)):
        if value is not None and value < 1:
            raise UserError(f"expected {name} to be at least 1, received {value}")
    from PIL.Image import DecompressionBombWarning

    # What has so many pixels that Pillow doubts it counts as unreadable; its warning would not name the file.
    warnings.simplefilter("error", DecompressionBombWarning)

    train, validation = (list_images(config.data_dir / name) for name in ("train", "val"))
    if unpaired := set(train.classes) ^ set(validation.classes):
        name = min(unpaired)
        here, there = ("train", "val") if name in train.classes else ("val", "train")
        raise UserError(
            f"expected the same classes in train/ and val/, received {name} in {config.data_dir / here} and not in "
            f"{config.data_dir / there}"
        )
    pool = ThreadPoolExecutor(config.decode_threads, thread_name_prefix="decode")
    return Dataset(
        train=ImageFolderSplit(train, config=config, pool=pool, augmented=True),
        validation=ImageFolderSplit(validation, config=config, pool=pool, augmented=False),
        input_shape=(config.image_size, config.image_size, 3),
        num_classes=len(train.classes),
        mean=MEAN,
        std=STD,
    )


def _require(package: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise UserError(
            f"expected {PACKAGES[package]} for --dataset image-folder, received no such package; install it, or choose "
            "another data set"
        ) from error


@dataclass(frozen=True)
class ImageList:
    """The files of a split, in the order of their class's name and then of their own."""

    folder: Path
    classes: tuple[str, ...]
    names: np.ndarray
    """File names as bytes of a fixed length: ImageNet's 1.3 million take 36 MB, as Python strings 110 MB."""
    labels: np.ndarray
    """int64 (samples,)"""

    def path(self, index: int) -> Path:
        return Path(os.path.join(self.folder, self.classes[self.labels[index]], os.fsdecode(self.names[index])))

    def same_class_from(self, index: int) -> Iterator[int]:
        """The indices of the class of `index`: itself, those after it, then those before it."""
        first, last = np.searchsorted(self.labels, [self.labels[index], self.labels[index] + 1]).tolist()
        yield from range(index, last)
        yield from range(first, index)


def list_images(folder: Path) -> ImageList:
    """Finds the images in the class folders of `folder`.

    Raises:
        UserError: there is no such folder, no class folder in it, or no image in one of those.
    """
    if not folder.is_dir():
        raise UserError(
            f"expected --data-dir to hold train/ and val/, with a folder of images a class, received none at {folder}"
        )
    classes = sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))
    if not classes:
        raise UserError(f"expected a folder of images for each class in {folder}, received none")
    names: list[bytes] = []
    num_images = []
    for name in classes:
        found = _image_names(folder / name)
        if not found:
            raise UserError(
                f"expected JPEG or PNG files in {folder / name}, received none; add images, or remove the class"
            )
        names += found
        num_images.append(len(found))
    labels = np.repeat(np.arange(len(classes), dtype=np.int64), num_images)
    return ImageList(folder=folder, classes=tuple(classes), names=np.array(names), labels=labels)


def _image_names(folder: Path) -> list[bytes]:
    # A link to nowhere stays in: it is an image that cannot be read, not one that was never there.
    return sorted(
        os.fsencode(e.name)
        for e in os.scandir(folder)
        if e.name.lower().endswith(SUFFIXES) and not e.name.startswith(".") and not e.is_dir()
    )


class ImageFolderSplit:
    """Decodes images as they are asked for.

    Training images (`augmented`) are cropped at random and mirrored every other time; validation images are
    cropped in the centre.

    An image that cannot be read stops the run. With `skip_unreadable`, the next readable one of its class
    takes its place, under the augmentation of the first, so that every epoch keeps its length and its balance
    of classes, and stays the same on any number of ranks.
    """

    parallel = True

    def __init__(self, images: ImageList, *, config: DataConfig, pool: ThreadPoolExecutor, augmented: bool) -> None:
        self.images = images
        self.size = config.image_size
        self.reader = Reader(config.image_size)
        self.seed = config.seed
        self.skip_unreadable = config.skip_unreadable
        self.pool = pool
        self.augmented = augmented
        self._unreadable: set[int] = set()

    def __len__(self) -> int:
        return len(self.images.labels)

    def unreadable_mask(self) -> np.ndarray:
        """1.0 for each file that this rank has tried to read and could not, else 0.0: float64 (samples,)."""
        mask = np.zeros(len(self))
        mask[list(self._unreadable)] = 1
        return mask

    def read(self, indices: np.ndarray, *, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        indices = np.asarray(indices)
        images = np.empty((len(indices), self.size, self.size, 3), dtype=np.uint8)
        draws = uniform_draws(indices, NUM_CROP_DRAWS + 1, seed=self.seed, epoch=epoch).tolist()
        tasks = self.pool.map(self._read_one, indices.tolist(), draws, images)
        for _ in tasks:
            pass  # The pixels are in place; this waits, and raises what a thread has raised.
        return images, self.images.labels[indices]

    def _read_one(self, index: int, draws: list[float], out: np.ndarray) -> None:
        """Writes the pixels of one sample into `out`, uint8 (size, size, 3)."""
        *crop_draws, flip_draw = draws
        box_of = functools.partial(random_resized_box, draws=crop_draws) if self.augmented else centre_box
        pixels = self._first_readable(index, box_of)
        if self.augmented and flip_draw < 0.5:
            for channel in range(3):  # in one go NumPy would copy pixel by pixel, three bytes each
                out[..., channel] = pixels[:, ::-1, channel]
        else:
            out[:] = pixels

    def _first_readable(self, index: int, box_of: Callable[[int, int], Box]) -> np.ndarray:
        for candidate in self.images.same_class_from(index):
            path = self.images.path(candidate)
            try:
                return self.reader.read(path, box_of)
            except UnreadableImage as error:
                if not self.skip_unreadable:
                    raise UserError(
                        f"expected an image in {path}, received what cannot be read as one ({error}); replace it, or "
                        "give --skip-unreadable"
                    ) from error
                self._unreadable.add(candidate)
        raise UserError(f"expected an image that can be read in {path.parent}, received none")


class Reader(threading.local):
    """Reads a box of an image at the network's size; every thread has a decoder and a resampler of its own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.decoder = Decoder()
        self.resample = resampler(size)

    def read(self, path: Path, box_of: Callable[[int, int], Box]) -> np.ndarray:
        """uint8 (size, size, 3)

        Raises:
            UnreadableImage: the file holds no image that can be read.
        """
        return self.resample(*self.decoder.decode(path, box_of, self.size))
