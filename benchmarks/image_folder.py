"""How fast the input pipeline reads a folder of images, beside torchvision's ImageFolder and a DataLoader.

No network is behind either. Both read the same JPEG files of 500 x 375 pixels in a random order, crop 224 x 224 at
random, flip, and hand out batches of 64; ours decodes in threads, the reference in as many processes.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from allstep.commands.shared.measure import Figure, job, median_ratio, run
from allstep.common.config.data_config import DataConfig
from allstep.common.data import datasets
from allstep.common.data.loader import train_batches
from allstep.common.data.sharding import Position

WIDTH, HEIGHT = 500, 375
QUALITY = 90
WORKERS = {1: "", 2: ">= 1.3", 4: ""}
"""Threads or processes that decode, and what is to be reached with so many: the target is for two cores."""
BATCH_SIZE = 64
IMAGE_SIZE = 224


@dataclass(frozen=True)
class Reading:
    """What reading an epoch took."""

    images_per_second: float
    """After the first batch."""
    cpu_milliseconds: float
    """Of an image, over all threads and processes: what does not change with how busy the machine is with others."""


def figures(num_images: int, num_rounds: int) -> tuple[list[Figure], dict[str, list[dict]]]:
    """Rows and samples, both sides in turn."""
    sides = {"ours": ours, "reference": reference}
    readings: dict[tuple[str, int], list[Reading]] = {(side, workers): [] for workers in WORKERS for side in sides}
    with tempfile.TemporaryDirectory(prefix="allstep-images-") as directory:
        write_images(Path(directory), num_images)
        for number in range(num_rounds):
            for (side, workers), taken in readings.items():
                taken.append(sides[side](Path(directory), workers))
                speed = f"image-folder, {workers} workers, {side} {taken[-1].images_per_second:.5g}"
                print(f"round {number + 1} of {num_rounds}: {speed}", file=sys.stderr, flush=True)

    def row(name: str, workers: int, what: str, target: str) -> Figure:
        one, other = ([getattr(taken, what) for taken in readings[side, workers]] for side in sides)
        return Figure(name, statistics.median(one), statistics.median(other), median_ratio(one, other), target)

    rows = [
        row(f"image-folder, {workers} workers: images/s / DataLoader", workers, "images_per_second", target)
        for workers, target in WORKERS.items()
    ]
    rows.append(row("image-folder, 2 workers: CPU ms an image / DataLoader", 2, "cpu_milliseconds", ""))
    samples = {
        f"image-folder, {workers} workers, {side}": [asdict(reading) for reading in taken]
        for (side, workers), taken in readings.items()
    }
    return rows, samples


def write_images(directory: Path, num_images: int) -> None:
    """Write train/ and val/ of two classes: smooth colours and noise, 90 kB a file, as ImageNet's files have."""
    for number in range(num_images):
        rng = np.random.default_rng(number)
        colours = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        pixels = np.asarray(colours.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC))
        noise = rng.normal(scale=14, size=pixels.shape)
        path = directory / "train" / f"class{number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8)).save(path, quality=QUALITY)
    for name in ("class0", "class1"):
        (directory / "val" / name).mkdir(parents=True)
        Image.new("RGB", (WIDTH, HEIGHT)).save(directory / "val" / name / "0.jpg")


def ours(directory: Path, workers: int) -> Reading:
    """An epoch of the loader on one rank."""
    config = DataConfig(dataset="image-folder", data_dir=directory, image_size=IMAGE_SIZE, decode_threads=workers)
    cpu = time.process_time()
    train = datasets.load(config).train
    batches = train_batches(train, Position(0, 0), global_batch_size=lambda _: BATCH_SIZE, seed=0, rank=0, world_size=1)
    next(batches)
    started = time.perf_counter()
    num_images = sum(batch.num_samples for batch in batches)
    seconds = time.perf_counter() - started
    return Reading(num_images / seconds, 1000 * (time.process_time() - cpu) / len(train))


def reference(directory: Path, workers: int) -> Reading:
    """An epoch of the DataLoader, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        flags = ("--data-dir", directory, "--workers", workers, "--batch-size", BATCH_SIZE, "--image-size", IMAGE_SIZE)
        run(job("allstep.benchmarks.handwritten.torchvision_images", output, *flags, num_ranks=None))
        return Reading(**json.loads(output.read_text()))
