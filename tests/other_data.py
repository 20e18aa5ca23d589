"""Data sets of other people that `tests/strangers` opens."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from allstep.common.data.datasets import DataConfig, Dataset, load, prepare

RANDOM = np.random.default_rng(0)
NUMBERS = RANDOM.normal(size=(60, 3)).astype(np.float32)
LABELS = np.arange(60) % 4
NAMES = np.array(["ant", "bee", "cat 2", "Łoś"])
"""Names of these labels."""
A, B, C = slice(0, 30), slice(30, 50), slice(50, 60)
"""Parts of their rows."""


def opened(dataset: str, cache: Path, **flags: object) -> Dataset:
    """Prepare and load a data set."""
    config = DataConfig(dataset, **{"data_dir": cache, "image_size": 8, "decode_threads": 2, **flags})  # pyright: ignore
    prepare(config)
    return load(config)


def picture(*, grey: bool = False) -> Image.Image:
    """Return an image of noise."""
    return Image.fromarray(RANDOM.integers(0, 256, (21, 26) if grey else (21, 26, 3)).astype(np.uint8))


def rows_of(dataset: Dataset) -> list[int]:
    """Return the numbers of the rows of NUMBERS in both parts, after comparing their labels."""
    found = []
    for split in (dataset.train, dataset.validation):
        inputs, labels = split.read(np.arange(len(split)), epoch=0)
        numbers = [int(np.flatnonzero((row == NUMBERS).all(1))[0]) for row in inputs]
        np.testing.assert_array_equal(labels, LABELS[numbers])
        found += numbers
    return sorted(found)


def archive(path: Path, part: slice) -> None:
    with tarfile.open(path, "w") as tar:
        for number in range(60)[part]:
            label = f"{chr(0xFEFF) * (number % 2)} {LABELS[number]}\n"  # every other one with a byte order mark
            add(tar, f"./{number:04}", **{"x.npy": npy(NUMBERS[number]), "CLS": label.encode()})


def add(tar: tarfile.TarFile, key: str, **files: bytes) -> None:
    for ending, data in files.items():
        member = tarfile.TarInfo(f"{key}.{ending}")
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def png(kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    picture().save(stream, kind)
    return stream.getvalue()
