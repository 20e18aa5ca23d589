"""The command line's group of flags about data: which data set, where it lies, how it is read."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from allstep.common.config.flags import number, whole
from allstep.common.process.errors import UserError

DatasetName = Literal["digits", "mnist", "fashion-mnist", "cifar10", "image-folder", "synthetic"]


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

    dataset: DatasetName = "digits"
    """Which samples to train on. mnist, fashion-mnist and cifar10 are downloaded once."""

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
    """image-folder: height and width in pixels of the images given to the network."""

    decode_threads: Annotated[int | None, whole(1, 1024, "as each is a thread of every rank")] = None
    """image-folder: threads per rank that decode images; the host's cores, divided among its ranks, if not given."""

    skip_unreadable: bool = False
    """image-folder: count unreadable images and put another of the same class in their place, do not stop."""

    curriculum: Path | None = None
    """File of a difficulty for each training sample, .npy or a number a line, as `allstep difficulty` writes it: easy
    samples come first (Bengio et al. 2009)."""

    curriculum_start: Annotated[float, number(0, 1, above=True)] = 0.25
    """Share of the samples, the easiest, with which the first epoch does."""

    curriculum_epochs: Annotated[int, whole(1, 10**6)] = 5
    """Epochs until all samples take part; their number grows evenly."""

    seed: Annotated[int, whole(0, 2**64 - 1)] = 0
    """Seed of the order of samples and of their augmentation."""
