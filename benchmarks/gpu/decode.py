"""Compare decoding of JPEG files by --decode gpu with the CPU, without training:

    python -m allstep.benchmarks.gpu.decode FILE --data-dir DIR --decode-threads N [--device cpu]

DIR is an image folder. Writes to FILE the images per second of both, including reading files from the disk, and the
mean difference of pixels. --device cpu only tests that it runs.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from allstep.commands.shared.records.files import write_json
from allstep.common.base.flag_types import Parser, whole
from allstep.common.config.data_config import DataConfig
from allstep.common.data import datasets
from allstep.common.process.exit import run_rank


@dataclass(frozen=True)
class Decoding:
    """Rates of decoding one epoch, and how far the results differ."""

    images_per_second: float
    images_per_second_cpu: float
    mean_difference: float
    """Mean absolute difference of pixels, which are 0 to 255."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("python -m allstep.benchmarks.gpu.decode", __doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--decode-threads", type=whole(1, 1024), required=True)
    parser.add_argument("--image-size", type=whole(1, 2**14), default=224)
    parser.add_argument("--batch-size", type=whole(1, 2**16), default=256)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    flags = parser.parse_args(argv)
    config = DataConfig(
        dataset="image-folder",
        data_dir=flags.data_dir,
        image_size=flags.image_size,
        decode_threads=flags.decode_threads,
    )
    write_json(flags.output, measure(config, flags.batch_size, flags.device))


def measure(config: DataConfig, batch_size: int, device: str) -> Decoding:
    """Decode the training images in batches, each batch by both decoders; the first batch is not timed."""
    import torch

    from allstep.pytorch.jpeg_decoding import JpegDecoder

    cpu, gpu = (datasets.load(replace(config, decode=decode)).train for decode in ("cpu", "gpu"))
    decoder = JpegDecoder(config.image_size, torch.device(device), tells=True)
    seconds, differences = {"cpu": 0.0, "gpu": 0.0}, []
    for begin in range(0, len(cpu), batch_size):
        indices = np.arange(begin, min(begin + batch_size, len(cpu)))
        moments = [time.perf_counter()]
        expected, _ = cpu.read(indices, epoch=0)
        moments.append(time.perf_counter())
        files, _ = gpu.read(indices, epoch=0)
        pixels = decoder(files)
        pixels[0, 0, 0, 0].item()  # waits for all of them
        moments.append(time.perf_counter())
        differences.append(np.abs(pixels.cpu().numpy().astype(int) - expected).mean())
        if begin:
            seconds["cpu"] += moments[1] - moments[0]
            seconds["gpu"] += moments[2] - moments[1]
    num_images = len(cpu) - batch_size
    return Decoding(num_images / seconds["gpu"], num_images / seconds["cpu"], float(np.mean(differences)))


if __name__ == "__main__":
    run_rank(main)
