"""Data sets of other people that `tests/strangers` opens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from allstep.common.data.datasets import DataConfig, Dataset, load, prepare

RANDOM = np.random.default_rng(0)


def opened(dataset: str, cache: Path, **flags: object) -> Dataset:
    """Prepare and load a data set."""
    config = DataConfig(dataset, **{"data_dir": cache, "image_size": 8, "decode_threads": 2, **flags})  # pyright: ignore
    prepare(config)
    return load(config)


def picture(*, grey: bool = False) -> Image.Image:
    """Return an image of noise."""
    return Image.fromarray(RANDOM.integers(0, 256, (21, 26) if grey else (21, 26, 3)).astype(np.uint8))
