"""The reference of image folders: torchvision's ImageFolder and a DataLoader with worker processes, no network behind.

    python -m allstep.benchmarks.handwritten.torchvision_images result.json --data-dir DIRECTORY --workers 2 \\
        --batch-size 64 --image-size 224
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from torchvision import datasets
from torchvision.transforms import v2


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path, help="JSON file")
    parser.add_argument("--data-dir", type=Path, required=True, help="holds train/CLASS/")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--image-size", type=int, required=True)
    flags = parser.parse_args(argv)
    torch.set_num_threads(1)

    crop = v2.RandomResizedCrop(flags.image_size, antialias=True)
    transform = v2.Compose([crop, v2.RandomHorizontalFlip(), v2.PILToTensor()])
    dataset = datasets.ImageFolder(flags.data_dir / "train", transform)
    loader = DataLoader(dataset, flags.batch_size, shuffle=True, num_workers=flags.workers)

    cpu = time.process_time()
    batches = iter(loader)
    next(batches)  # the workers have started
    started = time.perf_counter()
    num_images = sum(len(images) for images, _ in batches)
    seconds = time.perf_counter() - started
    del batches  # the workers end, and what they took is known
    workers = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = time.process_time() - cpu + workers.ru_utime + workers.ru_stime
    result = {"images_per_second": num_images / seconds, "cpu_milliseconds": 1000 * cpu / len(dataset)}
    flags.output.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
