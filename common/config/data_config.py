"""Command-line flags about data: which data set, where it is, and how it is read."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

from allstep.common.base.errors import UserError, did_you_mean, quote
from allstep.common.base.flag_types import nonempty_text, number, one_of, whole, wrong
from allstep.common.catalog import user_file

DatasetName = Literal["digits", "mnist", "fashion-mnist", "cifar10", "image-folder", "synthetic", "text", "text-topics"]
FORMATS = ("npz", "parquet", "tfrecord", "webdataset", "hf", "text")
"""Formats of user data sets: prefixes of FORMAT:PATH."""
NUMBERS = "numbers"
"""Internal value of `DataConfig.task`: floating-point targets are numbers, because --loss takes numbers."""
PYTHON = "python"
"""Kind of a data set that a user's function returns."""


def dataset_name(word: str) -> str:
    """Parse the value of --dataset: a known name, FORMAT:PATH or FILE.py:FUNCTION."""
    names = get_args(DatasetName)
    format_name, _, path = word.partition(":")
    is_path = format_name in FORMATS and path.strip() and "\0" not in path
    if word in (*names, user_file.PROGRAM) or is_path or user_file.parse(word):
        return word
    raise wrong(
        f"to be one of {', '.join(names)}, FILE.py:FUNCTION, or a path after one of {', '.join(FORMATS)} and a colon",
        word,
        did_you_mean(word, names, "name one"),
    )


def default_data_dir() -> Path:
    """Return the folder in the user's cache (XDG Base Directory Specification) that all checkouts share.

    Raises UserError if neither the environment nor /etc/passwd has a home folder.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "allstep" / "datasets"
    except RuntimeError:  # the user has no entry in /etc/passwd, as in some containers
        raise UserError(
            "expected HOME or XDG_CACHE_HOME to say where data sets are kept, received neither; set one of them"
        ) from None


def redact_url(url: str) -> str:
    """Return `url` without user, password and query, which may contain secrets."""
    return re.sub(r"^(\w+://)?[^/?#]*@|[?#].*", lambda match: match[1] or "", url)


@dataclass(frozen=True)
class DataConfig:
    """Flags for the data set and how it is read."""

    dataset: Annotated[str, dataset_name] = "digits"
    """Data set to train on: digits, mnist, fashion-mnist, cifar10, image-folder, synthetic, text or text-topics (mnist,
    fashion-mnist and cifar10 are downloaded once); or your own: text:FILE, npz:FILE, parquet:DIR, tfrecord:DIR,
    webdataset:DIR, hf:DIR (a Hugging Face data set saved to disk), or FILE.py:FUNCTION, called on every rank."""

    input_fields: Annotated[tuple[str, ...], nonempty_text] = ()
    """npz, parquet, tfrecord, webdataset, hf: the field of a sample that is the network's input, or several fields with
    one number each; default: a field with a usual name such as x, image or jpg."""

    target_field: str | None = None
    """npz, parquet, tfrecord, webdataset, hf: the field to predict; default: a field with a usual name such as y, label
    or cls."""

    standardize: bool = False
    """Inputs that are numbers: subtract the mean of each field over the training samples and divide by the standard
    deviation, as scikit-learn's StandardScaler does."""

    task: Annotated[str, one_of("auto", "classification", "regression")] = "auto"
    """Your own data sets: what the targets are, classification (classes: numbers, names or one-hot rows) or regression
    (numbers). auto: --loss decides, or else the targets' type and values; a line on stderr says so where they are not
    clear."""

    text_tokens: Literal["characters", "bytes"] = "characters"
    """text:FILE: tokens. characters: of UTF-8, or UTF-16 with a byte order mark; bytes: any file's, 256 of them."""

    validation_share: Annotated[float, number(0, 1, above=True, below=True)] = 0.1
    """Share of the samples held out for validation, chosen by --seed, if your own data set or the image-folder has no
    validation split."""

    validation_part: Annotated[str, one_of("auto", "validation", "test")] = "auto"
    """image-folder, npz, parquet, tfrecord, webdataset, hf: part to validate on, validation or test; auto: the first
    that is there."""

    data_dir: Path = field(default_factory=default_data_dir)
    """Folder of the data sets, each in its own folder; for image-folder the folder that holds train/ and val/, or the
    classes' folders."""

    mirror: str | None = None
    """URL of a folder with the data set's files, used instead of the usual mirrors. User, password and query in it, as
    in https://USER:PASSWORD@HOST/, are neither printed nor written to config.yaml."""

    synthetic_samples: Annotated[int, whole(1, 2**40)] = 60_000
    """synthetic: number of training samples. The number of validation samples is a sixth of it, at most 10,000."""

    synthetic_shape: Annotated[tuple[int, int, int], whole(1, 2**16)] = (28, 28, 1)
    """synthetic: height, width and channels of an image."""

    synthetic_classes: Annotated[int, whole(2, 2**20)] = 10
    """synthetic: number of classes."""

    image_size: Annotated[int, whole(1, 2**14)] = 224
    """image-folder, and your own image files: height and width in pixels of the images given to the network."""

    decode_threads: Annotated[int | None, whole(1, 1024, "as each is a thread of every rank")] = None
    """image-folder, and your own image files: decoding threads per rank, or processes if they are more than 4;
    default: the rank's share of cores."""

    data_workers: Annotated[int, whole(0, 256, "as each is a process of every rank")] = 0
    """Map-style data sets, of FILE.py:FUNCTION or a Session: processes per rank that read samples, as num_workers of
    PyTorch's DataLoader; 0: the rank itself reads them."""

    decode: Literal["auto", "cpu", "gpu"] = "auto"
    """image-folder in PyTorch: device that decodes and resizes JPEG files. auto is cpu, so that curves do not depend on
    the machine: gpu (nvJPEG) rounds pixels differently. gpu helps hosts with few cores per GPU."""

    exif_orientation: bool = False
    """image-folder, and your own image files: turn images as EXIF says that the camera was held."""

    skip_unreadable: bool = False
    """image-folder, your own image files: replace unreadable images by others of their class, and count them."""

    sampler: Literal["shuffle", "balanced"] = "shuffle"
    """Training samples of an epoch. shuffle: each once; balanced: equally many of every class, so that those of small
    classes repeat. The order depends on seed and epoch alone."""

    curriculum: Path | None = None
    """File with the difficulty of each training sample (.npy, or one number per line), as `allstep difficulty` writes
    it. Easy samples come first (Bengio et al. 2009)."""

    curriculum_start: Annotated[float, number(0, 1, above=True)] = 0.25
    """Share of the samples, the easiest ones, that the first epoch uses."""

    curriculum_epochs: Annotated[int, whole(1, 10**6)] = 5
    """Epochs until all samples are used; their number grows linearly."""

    mixup: Annotated[float, number(0, 100)] = 0.0
    """Train on weighted sums of two images and of their labels, with weights from Beta(A, A) (Zhang et al. 2018)."""

    cutmix: Annotated[float, number(0, 100)] = 0.0
    """Replace a box of each image by that of another, its area from Beta(A, A), and mix labels (Yun et al. 2019)."""

    random_erasing: Annotated[float, number(0, 1)] = 0.0
    """Probability that a box of a training image is replaced by noise (Zhong et al. 2020)."""

    rand_augment: Annotated[int, whole(0, 16)] = 0
    """Number of random changes of colours and sharpness per training image (Cubuk et al. 2020)."""

    seed: Annotated[int, whole(0, 2**64 - 1)] = 0
    """Seed of the order of samples and of their augmentation."""

    def task_with(self, loss: str | None) -> str:
        """Return the task, which --loss decides for targets that may be classes or numbers if --task does not."""
        return NUMBERS if self.task == "auto" and loss not in (None, "cross-entropy") else self.task

    @property
    def kind(self) -> str:
        """Name of a built-in data set, format of a user's data set, or `PYTHON`."""
        return PYTHON if user_file.parse(self.dataset) else self.dataset.partition(":")[0]

    @property
    def path(self) -> Path | None:
        """File or folder of a user's data set; None for a built-in one."""
        if file := user_file.parse(self.dataset):
            return file[0]
        path = self.dataset.partition(":")[2]
        return Path(path) if path else None


def check_path(config: DataConfig) -> None:
    """Refuse a data set's path that does not exist or is of another kind, before a framework is imported."""
    if (path := config.path) is None:
        return
    is_file = config.kind in (PYTHON, "npz", "text")
    if (is_file and path.is_file()) or (not is_file and path.is_dir()):
        return
    wanted = "file" if is_file else "folder"
    received = "a folder" if path.is_dir() else "a file" if path.is_file() else "neither a file nor a folder"
    received = received if path.exists() else "nothing"
    raise UserError(
        f"expected a {wanted} at {quote(path)} for --dataset {quote(config.dataset)}, received {received}; name the "
        f"{wanted} that holds the samples"
    )
