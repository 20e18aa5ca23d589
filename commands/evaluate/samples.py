"""Samples that a trained network is evaluated on: made as in its validation, and checked against its description."""

from __future__ import annotations

import copy
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from allstep.common.base.errors import UserError, quote
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets import Dataset, Split
from allstep.common.data.datasets.subset import Subset
from allstep.common.data.formats.parts import files_below
from allstep.common.data.images.decoding import IMAGE_ENDINGS, image_content
from allstep.common.data.images.encoded import EncodedSplit, prepare_decoding
from allstep.common.data.passed_over import PassedOver
from allstep.common.launch.placement import Placement, cores_per_rank
from allstep.common.training.description import Description, check_same, described

_ADVICE = "evaluate on samples like those of the run"


def fitted(dataset: Dataset, data: DataConfig, run: Description | None, *, part: str) -> Dataset:
    """Return a data set whose validation part is the `part` to evaluate (train or validation), as the run preprocesses.

    Raises UserError if its samples or classes are not those of the run.
    """
    if part == "train":
        dataset = dataclasses.replace(dataset, validation=_plain(dataset.train))
    if run is None:
        return dataset
    has_fewer = not dataset.class_names and dataset.task == "classification" and dataset.num_classes < run.num_classes
    if has_fewer:  # numbers of classes, of which the highest do not occur
        dataset = dataclasses.replace(dataset, num_classes=run.num_classes)
    check_same(run, described(dataset), advice=_ADVICE, only=lambda name: name not in ("mean", "std", "fields"))
    return dataclasses.replace(dataset, mean=run.mean, std=run.std, class_names=run.classes or dataset.class_names)


def _plain(split: Split) -> Split:
    """Return the samples of a training part as validation reads them."""
    if isinstance(split, Subset):
        return Subset(_plain(split.whole), split.indices)
    if isinstance(split, EncodedSplit):
        split = copy.copy(split)
        split.augmented = False
    return split


@dataclass(frozen=True)
class Pictures:
    """Files of pictures without classes; `encoded.EncodedImages` documents the methods."""

    paths: tuple[Path, ...]
    labels: np.ndarray

    def path(self, index: int) -> Path:
        return self.paths[index]

    def content(self, index: int) -> bytes:
        return image_content(self.path(index))

    def name(self, index: int) -> str:
        return str(self.path(index))


def unlabelled(folder: Path, run: Description, data: DataConfig, placement: Placement) -> Dataset:
    """Return the pictures below a folder, in the order of their paths, with targets of 0 that mean nothing.

    Raises UserError if there are none, or the run was not trained on files of pictures.
    """
    if run.image_files is None:
        raise UserError(
            f"--images needs a run that was trained on files of pictures, this one on {run.input_type} of shape "
            f"{run.input_shape}; give --dataset"
        )
    if not folder.is_dir():
        raise UserError(f"expected a folder of pictures at --images {quote(folder)}, received none; name one")
    names = [name for name in files_below(folder, PassedOver()) if name.lower().endswith(IMAGE_ENDINGS)]
    if not names:
        raise UserError(f"expected pictures in --images {quote(folder)}, received none; name another folder")
    threads = data.decode_threads or cores_per_rank(placement)
    files = run.image_files
    data = dataclasses.replace(
        data, image_size=files.size, exif_orientation=files.exif_orientation, decode_threads=threads
    )
    prepare_decoding(data)
    samples = run.dataset()
    labels = np.zeros((len(names), *samples.target_shape), samples.target_type)
    pictures = Pictures(tuple(folder / name for name in names), labels)
    split = EncodedSplit(pictures, config=data, pool=ThreadPoolExecutor(threads), augmented=False)
    return dataclasses.replace(samples, train=split, validation=split)


def path_of(split: Split, index: int) -> str | None:
    """Return the file of a sample; None if samples are no files of their own."""
    if isinstance(split, Subset):
        return path_of(split.whole, int(split.indices[index]))
    images: Any = getattr(split, "images", None)
    return str(images.path(index)) if hasattr(images, "path") else None
