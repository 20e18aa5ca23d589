"""JPEG files like ImageNet's in size and texture, for image-folder: 500 x 375, quality 90, about 100 kB."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 500, 375
NUM_CLASSES = 10
VALIDATION_SHARE = 20  # one in so many images is a validation image


def write_images(folder: Path, number: int) -> None:
    """Write `number` training images and their validation images under folder/train and folder/val, by class."""
    for split in ("train", "val"):
        for label in range(NUM_CLASSES):
            (folder / split / f"class{label}").mkdir(parents=True)
    last = number + max(NUM_CLASSES, number // VALIDATION_SHARE)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(partial(_write, folder, number), range(last), chunksize=32))


def _write(folder: Path, num_training: int, index: int) -> None:
    """Coarse colours with noise over them: noise alone would not compress as photographs do."""
    generator = np.random.default_rng(index)
    coarse = Image.fromarray(generator.integers(0, 256, (24, 32, 3), np.uint8))
    smooth = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.float32)
    noisy = smooth + generator.normal(scale=14, size=smooth.shape)
    split = "train" if index < num_training else "val"
    file = folder / split / f"class{index % NUM_CLASSES}" / f"{index}.jpg"
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, quality=90)
