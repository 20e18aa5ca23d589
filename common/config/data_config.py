"""The command line's group of flags about data: which data set, where it lies, how it is read."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

from allstep.common.base.errors import UserError, quote
from allstep.common.base.flag_types import nonempty_text, number, whole, wrong
from allstep.common.catalog import user_file

DatasetName = Literal["digits", "mnist", "fashion-mnist", "cifar10", "image-folder", "synthetic", "text", "text-topics"]
FORMATS = ("npz", "parquet", "tfrecord", "webdataset", "hf", "text")
"""What stands before the colon and the path of a data set of the user's own."""
PYTHON = "python"
"""The kind of a data set that a function of the user's own returns."""


def dataset_name(word: str) -> str:
    """A data set by its name, FORMAT:PATH or FILE.py:FUNCTION: the type of --dataset."""
    names = get_args(DatasetName)
    format_name, _, path = word.partition(":")
    is_path = format_name in FORMATS and path.strip() and "\0" not in path
    if word in (*names, user_file.PROGRAM) or is_path or user_file.parse(word):
        return word
    near = difflib.get_close_matches(word, names, n=1)
    raise wrong(
        f"to be one of {', '.join(names)}, FILE.py:FUNCTION, or a path after one of {', '.join(FORMATS)} and a colon",
        word,
        f"did you mean {near[0]}?" if near else "name one",
    )


def default_data_dir() -> Path:
    """The user's cache (XDG Base Directory Specification), shared by every checkout and environment.

    Raises:
        UserError: nothing says where it is.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "allstep" / "datasets"
    except RuntimeError:  # a user who has no entry in /etc/passwd, as in some containers
        raise UserError(
            "expected HOME or XDG_CACHE_HOME to say where data sets are kept, received neither; set one of them"
        ) from None


def redact_url(url: str) -> str:
    """`url` as it may be shown and kept: without user, password and query, where tokens stand."""
    return re.sub(r"^(\w+://)?[^/?#]*@|[?#].*", lambda match: match[1] or "", url)


@dataclass(frozen=True)
class DataConfig:
    """The data set and how it is read."""

    dataset: Annotated[str, dataset_name] = "digits"
    """Which samples to train on: digits, mnist, fashion-mnist, cifar10, image-folder, synthetic, text or text-topics,
    of which mnist, fashion-mnist and cifar10 are downloaded once; or your own: text:FILE, npz:FILE, parquet:DIR,
    tfrecord:DIR, webdataset:DIR, hf:DIR (a Hugging Face data set saved to disk), or FILE.py:FUNCTION, which every rank
    imports and calls."""

    input_fields: Annotated[tuple[str, ...], nonempty_text] = ()
    """npz, parquet, tfrecord, webdataset, hf: the field of a sample that the network sees, or several that are one
    number each; without any, one by a usual name, such as x, image or jpg."""

    target_field: str | None = None
    """The same: the field that it is to predict; one by a usual name, such as y, label or cls, if not given."""

    validation_share: Annotated[float, number(0, 1, above=True, below=True)] = 0.1
    """Share of the samples that validate, chosen by --seed, where a data set of your own has no part for that."""

    data_dir: Path = field(default_factory=default_data_dir)
    """Where data sets are kept, a folder each; for image-folder the folder that holds train/ and val/."""

    mirror: str | None = None
    """URL of a folder that holds the data set's files, asked instead of the usual mirrors. User and password in it, as
    in https://USER:PASSWORD@HOST/, and its query are used, but neither printed nor written to config.yaml."""

    synthetic_samples: Annotated[int, whole(1, 2**40)] = 60_000
    """synthetic: number of training samples. A sixth as many, at most 10,000, are validation samples."""

    synthetic_shape: Annotated[tuple[int, int, int], whole(1, 2**16)] = (28, 28, 1)
    """synthetic: height, width and channels of an image."""

    synthetic_classes: Annotated[int, whole(2, 2**20)] = 10
    """synthetic: number of classes."""

    image_size: Annotated[int, whole(1, 2**14)] = 224
    """image-folder, and your own JPEG and PNG files: height and width in pixels of the images given to the network."""

    decode_threads: Annotated[int | None, whole(1, 1024, "as each is a thread of every rank")] = None
    """The same: threads per rank that decode images; the host's cores, divided among its ranks, if not given."""

    decode: Literal["auto", "cpu", "gpu"] = "auto"
    """image-folder in PyTorch: what decodes and resizes JPEG files. auto is cpu: on a gpu (nvJPEG) pixels differ by
    rounding, and a curve shall not depend on the machine; it is for GPUs that have few cores each."""

    skip_unreadable: bool = False
    """The same: count unreadable images and put another of the same class in their place, do not stop."""

    curriculum: Path | None = None
    """File of a difficulty for each training sample, .npy or a number a line, as `allstep difficulty` writes it: easy
    samples come first (Bengio et al. 2009)."""

    curriculum_start: Annotated[float, number(0, 1, above=True)] = 0.25
    """Share of the samples, the easiest, with which the first epoch does."""

    curriculum_epochs: Annotated[int, whole(1, 10**6)] = 5
    """Epochs until all samples take part; their number grows evenly."""

    mixup: Annotated[float, number(0, 100)] = 0.0
    """Train on sums of two images and of their labels, in shares of the distribution Beta(A, A) (Zhang et al. 2018)."""

    cutmix: Annotated[float, number(0, 100)] = 0.0
    """The same with a box of one image in the other, and labels in the shares of the areas (Yun et al. 2019)."""

    random_erasing: Annotated[float, number(0, 1)] = 0.0
    """Probability with which a box of a training image becomes noise (Zhong et al. 2020)."""

    rand_augment: Annotated[int, whole(0, 16)] = 0
    """Operations on colours and sharpness, chosen at random, for each training image (Cubuk et al. 2020)."""

    seed: Annotated[int, whole(0, 2**64 - 1)] = 0
    """Seed of the order of samples and of their augmentation."""

    @property
    def kind(self) -> str:
        """The name of a data set that we know, the format of one that we do not, or `PYTHON`."""
        return PYTHON if user_file.parse(self.dataset) else self.dataset.partition(":")[0]

    @property
    def path(self) -> Path | None:
        """The file or folder of a data set of the user's own; None for one that we know."""
        if file := user_file.parse(self.dataset):
            return file[0]
        path = self.dataset.partition(":")[2]
        return Path(path) if path else None


def check_path(config: DataConfig) -> None:
    """Look whether a data set of the user's own is there, before a framework is imported.

    Raises:
        UserError: it is not, or a file stands where a folder should, or the other way round.
    """
    if (path := config.path) is None:
        return
    is_file = config.kind in (PYTHON, "npz", "text")
    if path.is_file() if is_file else path.is_dir():
        return
    wanted, other = ("file", "a folder") if is_file else ("folder", "a file")
    received = other if path.exists() else "nothing"
    raise UserError(
        f"expected a {wanted} at {quote(path)} for --dataset {quote(config.dataset)}, received {received}; name the "
        f"{wanted} that holds the samples"
    )
