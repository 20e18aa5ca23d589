"""image-folder: JPEG and PNG files in train/CLASS/ and val/CLASS/, the layout of ImageNet.

Classes are numbered in the order of their names. Hidden files, files of other types and deeper folders are
ignored; symbolic links are followed.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.base import Dataset
from allstep.common.data.images.decoding import image_content
from allstep.common.data.images.encoded import MEAN, STD, EncodedSplit, prepare_decoding

SUFFIXES = (".jpg", ".jpeg", ".png")


def prepare(config: DataConfig) -> None:
    """Check the folders as `load` does, so that only one rank reports a mistake."""
    load(config)


def load(config: DataConfig) -> Dataset:
    """List the files without decoding any.

    Raises:
        UserError: a package is not installed, a flag is out of range, a folder is missing, a class has no image,
            or train/ and val/ differ in their classes.
    """
    prepare_decoding(config)
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
        train=EncodedSplit(train, config=config, pool=pool, augmented=True),
        validation=EncodedSplit(validation, config=config, pool=pool, augmented=False),
        input_shape=(config.image_size, config.image_size, 3),
        num_classes=len(train.classes),
        mean=MEAN,
        std=STD,
        encoded=config.decode == "gpu",
    )


@dataclass(frozen=True)
class ImageList:
    """Files of a split, sorted by class name and then by file name."""

    folder: Path
    classes: tuple[str, ...]
    names: np.ndarray
    """File names as bytes of fixed length: ImageNet's 1.3 million take 36 MB, as Python strings 110 MB."""
    labels: np.ndarray
    """Class of each sample, int64 (samples,)."""

    def content(self, index: int) -> bytes:
        return image_content(self.path(index))

    def name(self, index: int) -> str:
        return str(self.path(index))

    def path(self, index: int) -> Path:
        return Path(os.path.join(self.folder, self.classes[self.labels[index]], os.fsdecode(self.names[index])))


def list_images(folder: Path) -> ImageList:
    """Find the images in the class folders of `folder`.

    Raises:
        UserError: the folder does not exist or has no class folders, or a class folder has no images.
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
    # Broken links are kept, since they are unreadable images rather than absent ones.
    return sorted(
        os.fsencode(e.name)
        for e in os.scandir(folder)
        if e.name.lower().endswith(SUFFIXES) and not e.name.startswith(".") and not e.is_dir()
    )
