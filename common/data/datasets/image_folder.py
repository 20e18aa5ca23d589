"""image-folder: image files in train/CLASS/ and val/CLASS/, the layout of ImageNet and of torchvision's ImageFolder.

Classes are numbered in the order of their names, and have images at any depth. Without val/ (or another name of it), or
with the class folders in the data folder itself, a share of the images is held out for validation. Symbolic links are
followed. Hidden files, and files that are no images, are passed over, counted and told.
"""

import contextlib
import mmap
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from allstep.common.base.errors import UserError, quote
from allstep.common.config.data_config import DataConfig
from allstep.common.data.classes import look
from allstep.common.data.datasets.base import Dataset, hold_out
from allstep.common.data.formats.parts import (
    TRAINING_NAMES,
    UNNAMED,
    choose_parts,
    files_below,
    folders_in,
    marked_part,
    part_named,
)
from allstep.common.data.images.decoding import IMAGE_ENDINGS, image_content
from allstep.common.data.images.encoded import MEAN, STD, encoded_splits, prepare_decoding
from allstep.common.data.passed_over import PassedOver
from allstep.common.files.disk import changed


def prepare(config: DataConfig) -> None:
    """Check the folders as `load` does, so that only one rank reports a mistake."""
    load(replace(config, decode_threads=1))


def load(config: DataConfig) -> Dataset:
    """List the files without decoding any.

    Raises UserError if a package is not installed, a folder is missing, a class has no image, or both parts differ in
    their classes.
    """
    prepare_decoding(config)
    passed = PassedOver()
    train, validation = (folder and list_images(folder, passed) for folder in _part_folders(config, passed))
    assert train is not None  # _part_folders has found it
    if validation and (unpaired := set(train.classes) ^ set(validation.classes)):
        name = min(unpaired)
        here, there = (train, validation) if name in train.classes else (validation, train)
        alike = [ascii(other) for other in there.classes if look(other).casefold() == look(name).casefold()]
        shown, hint = (ascii(name), f", which has {alike[0]}; give them one name") if alike else (quote(name), "")
        raise UserError(
            f"expected the same classes in {train.folder.name}/ and {validation.folder.name}/, received {shown} in "
            f"{here.folder} and not in {there.folder}{hint}"
        )
    passed.tell(config.data_dir)
    splits = encoded_splits(train, validation or train, config)
    return Dataset(
        *hold_out(*splits, config, train.folder, has_own=validation is not None),
        input_shape=(config.image_size, config.image_size, 3),
        num_classes=len(train.classes),
        mean=MEAN,
        std=STD,
        encoded=config.decode == "gpu",
        class_names=train.classes,
    )


def _part_folders(config: DataConfig, passed: PassedOver) -> tuple[Path, Path | None]:
    """Return the folders of both parts; the second is None if a share of the first is held out.

    Raises UserError if there is neither train/ nor a folder of images for each class.
    """
    data_dir = config.data_dir
    names = folders_in(data_dir, PassedOver()) if data_dir.is_dir() else []
    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault(part_named(name), []).append(name)
    others = [name for name in parts.pop(UNNAMED, []) if name != "derived"]
    if not parts and any(_images_in(data_dir / name, data_dir, PassedOver()) for name in others):
        _check_no_parts(data_dir, others)
        return data_dir, None
    train, validation = choose_parts(parts, passed, "folders", config)
    if train is None:
        raise UserError(
            "expected --data-dir to hold train/ and val/, with a folder of images a class, or these folders "
            f"themselves, received none at {data_dir / TRAINING_NAMES[0]}"
        )
    others += [name for part in sorted({train, validation or train}) for name in parts[part][1:]]
    passed.add_all(f"folders beside {train}/", others)
    return data_dir / parts[train][0], data_dir / parts[validation][0] if validation else None


def _check_no_parts(data_dir: Path, names: list[str]) -> None:
    """Refuse parts in the place of classes: training_set/ and test_set/, or data/train/ and data/val/."""
    inside = {name: folders_in(data_dir / name, PassedOver()) for name in names}
    marks = {name: marked_part(name) if inside[name] else UNNAMED for name in names}
    around = [name for name in names if len({part_named(one) for one in inside[name]} - {UNNAMED}) > 1]
    if around or (UNNAMED not in marks.values() and {*marks.values()} & {*TRAINING_NAMES}):
        found = f"{quote(around[0])}, which holds train/" if around else quote(", ".join(names))
        raise UserError(
            f"expected train/ and val/, or a folder of images for each class, in {data_dir}, received {found}; name "
            "the folder that holds train/ by --data-dir, or rename folders"
        )


@dataclass(frozen=True)
class ImageList:
    """Files of a split, sorted by class name and then by file name."""

    folder: Path
    classes: tuple[str, ...]
    names: np.ndarray
    """Paths in the class's folder as bytes of fixed length: ImageNet's 1.3 million take 36 MB, as str 110 MB."""
    labels: np.ndarray
    """Class of each sample, int64 (samples,)."""
    hashes: np.ndarray
    """Hash of each file, uint32 (samples,), 0 until it is read; in memory that this process shares with its forks."""

    def content(self, index: int) -> bytes:
        data = image_content(self.path(index))
        if (found := xxhash.xxh32_intdigest(data)) != self.hashes[index] and self.hashes[index]:
            raise changed(self.path(index))
        self.hashes[index] = found
        return data

    def sizes(self, indices: np.ndarray) -> np.ndarray:
        """Return the sizes of files in bytes, 0 for those that cannot be read."""
        folders = [os.fsencode(os.path.join(self.folder, name, "")) for name in self.classes]
        sizes = np.zeros(len(indices), np.int64)
        for number, (name, label) in enumerate(zip(self.names[indices].tolist(), self.labels[indices], strict=True)):
            with contextlib.suppress(OSError):
                sizes[number] = os.stat(folders[label] + name).st_size
        return sizes

    def name(self, index: int) -> str:
        return str(self.path(index))

    def path(self, index: int) -> Path:
        return Path(os.path.join(self.folder, self.classes[self.labels[index]], os.fsdecode(self.names[index])))


def list_images(folder: Path, passed: PassedOver) -> ImageList:
    """Find the images in the class folders of `folder`.

    `passed` counts what is left out. Raises UserError if the folder has no class folders, or a class folder has no
    images.
    """
    classes = folders_in(folder, passed)
    if not classes:
        raise UserError(f"expected a folder of images for each class in {folder}, received none")
    names: list[bytes] = []
    num_images = []
    for name in classes:
        left_out = PassedOver()
        found = _images_in(folder / name, folder, left_out)
        if not found:
            raise UserError(
                f"expected images in {folder / name}, received none{f' ({left_out})' if left_out.found else ''}; add "
                "images, or remove the class"
            )
        passed.update(left_out)
        names += map(os.fsencode, found)
        num_images.append(len(found))
    labels = np.repeat(np.arange(len(classes), dtype=np.int64), num_images)
    hashes = np.frombuffer(mmap.mmap(-1, 4 * len(labels)), np.uint32)
    return ImageList(folder=folder, classes=tuple(classes), names=np.array(names), labels=labels, hashes=hashes)


def _images_in(folder: Path, part: Path, passed: PassedOver) -> list[str]:
    """Return the relative paths of a class's images."""
    images = []
    for path in files_below(folder, passed, within=part):
        if path.lower().endswith(IMAGE_ENDINGS):
            images.append(path)
        else:
            passed.add("files that are no images", os.path.join(folder.name, path))
    return images
