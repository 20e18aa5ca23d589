"""Flags and samples with which a trained network is evaluated: those of its validation, or those that the user gives.

A run directory is data: code that it names is imported only if the user names it again.
"""

import copy
import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from allstep.common.api.session import words_of
from allstep.common.base.errors import UserError, quote
from allstep.common.base.flag_types import flag_name, flag_value
from allstep.common.catalog import user_file
from allstep.common.cli.data_validation import DATA_FLAGS
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets import Dataset, Split
from allstep.common.data.datasets.base import Subset
from allstep.common.data.formats.parts import files_below
from allstep.common.data.images.decoding import IMAGE_ENDINGS, image_content
from allstep.common.data.images.encoded import EncodedSplit, prepare_decoding
from allstep.common.data.passed_over import PassedOver
from allstep.common.launch.placement import Placement, cores_per_rank
from allstep.common.training.description import Description, check_same, described
from allstep.common.training.trained import Trained

_ADVICE = "evaluate on samples like those of the run"


def fitted(dataset: Dataset, data: DataConfig, run: Description | None, *, part: str) -> Dataset:
    """Return a data set whose validation part is the `part` to evaluate (train or validation), scaled as in the run.

    Raises UserError if its samples or classes are not those of the run.
    """
    if part == "train":
        dataset = dataclasses.replace(dataset, validation=_plain(dataset.train))
    if run is None:
        return dataset
    # Of classes and tokens that are numbers, the highest need not occur.
    if dataset.task != "regression" and not dataset.class_names and not dataset.vocabulary:
        dataset = dataclasses.replace(dataset, num_classes=max(dataset.num_classes, run.num_classes))
    if dataset.num_tokens and not dataset.vocabulary:
        dataset = dataclasses.replace(dataset, num_tokens=max(dataset.num_tokens, run.num_tokens))
    now = described(dataset)
    are_joined = len(run.fields) > 2 < len(now.fields)  # several columns become one sample, in their order
    now = dataclasses.replace(now, fields=(*now.fields[:-1], *run.fields[-1:]) if are_joined else run.fields)
    check_same(run, now, advice=_ADVICE, only=lambda name: name not in ("mean", "std"))
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


_NETWORK = ("model", "model-args", "model-depth", "model-width", "loss", "precision", "seed")
_PICTURES = ("image-size", "exif-orientation", "validation-share")
_DATA = (
    *("dataset", "data-dir", "input-fields", "target-field", "task", "text-tokens", "validation-part"),
    *("synthetic-samples", "synthetic-shape", "synthetic-classes"),
)
"""Flags that another --dataset makes void."""


def words_for(trained: Trained, given: Sequence[str]) -> list[str]:
    """Return the words of a trainer's command line: the run's own flags, and `given`, which win.

    Raises UserError if the run names code, or an object of a program, that the user has not named.
    """
    names, config = set(map(flag_name, given)), trained.config
    kind = DataConfig(dataset=flag_value(given, "dataset") or str(config.get("dataset"))).kind
    pictures = [name for name in _PICTURES if kind in DATA_FLAGS[name.replace("-", "_")]]
    kept = (*_NETWORK, *pictures, *(() if "dataset" in names else _DATA))
    flags = {name: config[name] for name in kept if config.get(name) not in (None, [], False) and name not in names}
    for name in user_file.FLAGS:
        if flags.get(name) == user_file.PROGRAM:
            raise UserError(
                f"the --{name} of the run was an object of a program; name it in a file: --{name} FILE.py:NAME"
            )
    no_optimizer = {"momentum": 0.0} if "optimizer" not in names else {}
    return [*words_of({**user_file.trusted_flags(flags, given), **no_optimizer}), *given]
