"""digits: the 1,797 real handwritten digits of 8x8 pixels that are included in scikit-learn; no download.

Source: Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository,
1998; its test part, written by 13 people.
"""

import gzip
import importlib.util
from pathlib import Path

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.base import ArraySplit, Dataset

VALIDATION_EVERY = 5


def prepare(config: DataConfig) -> None:
    """Check that scikit-learn is installed."""
    _file()


def load(config: DataConfig) -> Dataset:
    """Split the digits: every fifth sample of each class (360 in all) is for validation, the other 1,437 for training.

    Raises UserError if scikit-learn is not installed.
    """
    with gzip.open(_file(), "rt") as lines:
        rows = np.loadtxt(lines, delimiter=",", dtype=np.uint16)
    # Scale brightness from 0..16 to 0..255.
    images = ((rows[:, :64] * 255 + 8) // 16).astype(np.uint8).reshape(-1, 8, 8, 1)
    labels = rows[:, 64].astype(np.int64)

    is_validation = np.zeros(len(labels), dtype=bool)
    is_validation[np.argsort(labels, kind="stable")[::VALIDATION_EVERY]] = True
    train = ArraySplit(images[~is_validation], labels[~is_validation])
    return Dataset(
        train=train,
        validation=ArraySplit(images[is_validation], labels[is_validation]),
        input_shape=(8, 8, 1),
        num_classes=10,
        mean=(float(train.inputs.mean() / 255),),
        std=(float(train.inputs.std() / 255),),
    )


def _file() -> Path:
    """Return the path of scikit-learn's copy of the data, without importing scikit-learn, which takes a second."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise UserError(
            "expected scikit-learn for --dataset digits, received no such package; install it, or choose another data "
            "set"
        )
    return Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
