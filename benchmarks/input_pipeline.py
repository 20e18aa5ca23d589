"""Training end to end, input included, beside the input pipeline of Horovod's pytorch_mnist example; and image files:

    python -m allstep.benchmarks.input_pipeline [--output runs/input_pipeline.json] [--quick]

Both train on the same IDX files of MNIST's shape, 60,000 images that this benchmark makes itself, for one epoch on 2
ranks of one thread each, 64 images a rank and step. The reference reads them through torchvision's data set,
ToTensor, Normalize, DistributedSampler and DataLoader.

    cnn / no input      the cnn beside a loop by hand whose data lie in memory: what any input pipeline could reach
    cnn, mlp            the cnn, and a network so small that the input decides, beside the reference
    image-folder        JPEG files of 500 x 375 pixels, read by 1, 2 and 4 workers on one rank with no network behind,
                        beside torchvision's ImageFolder and a DataLoader with as many

Rates are images per second, medians over interleaved rounds. The exit status is 0 where the target is reached.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import statistics
import struct
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from allstep.benchmarks import image_folder
from allstep.commands.shared.measure import (
    epoch_rates,
    interleaved,
    job,
    median_ratio,
    print_table,
    run,
    run_handwritten,
    save,
)
from allstep.commands.shared.records.figures import Figure
from allstep.commands.shared.records.files import output_file
from allstep.common.base.flag_types import MAX_ROUNDS, Parser, whole
from allstep.common.config.data_config import DataConfig
from allstep.common.data import datasets
from allstep.common.data.datasets.mnist import FILE_NAMES
from allstep.common.process.exit import run_rank

BATCH_SIZE = 64
MODELS = ("cnn", "mlp")
SAMPLES_IN_MEMORY = 64 * BATCH_SIZE


def write_idx_files(directory: Path, num_samples: int) -> None:
    """Write a data set of MNIST's shape and files: gzipped for the trainer, plain under MNIST/raw for torchvision.

    The trainer takes files that are not MNIST's own by the checksums in SHA256SUMS.
    """
    dataset = datasets.load(DataConfig(dataset="synthetic", synthetic_samples=num_samples))
    zipped, plain = directory / "mnist", directory / "MNIST" / "raw"
    zipped.mkdir()
    plain.mkdir(parents=True)
    sums = []
    for split, names in {dataset.train: FILE_NAMES["train"], dataset.validation: FILE_NAMES["validation"]}.items():
        images, labels = split.read(np.arange(len(split)), epoch=0)
        for name, array in zip(names, (images[..., 0], labels.astype(np.uint8)), strict=True):
            content = idx(array)
            (plain / name.removesuffix(".gz")).write_bytes(content)
            compressed = gzip.compress(content, compresslevel=1)
            (zipped / name).write_bytes(compressed)
            sums.append(f"{hashlib.sha256(compressed).hexdigest()}  {name}\n")
    (zipped / "SHA256SUMS").write_text("".join(sums))


def idx(array: np.ndarray) -> bytes:
    """A uint8 array in the IDX format (`common/data/datasets/mnist.py` says what that is)."""
    return struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.tobytes()


def trainer(model: str, data_dir: Path) -> float:
    """Images per second of the trainer over one epoch."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "output"
        flags = ("--dataset", "mnist", "--data-dir", data_dir, "--model", model, "--batch-size", BATCH_SIZE)
        run(job("allstep.pytorch.train", *flags, "--epochs", 1, "--output-dir", output))
        return epoch_rates(output, num_warmup=0)[0]


def example(model: str, data_dir: Path) -> float:
    """Images per second of the example's pipeline over one epoch."""
    [rate] = _handwritten("torchvision_mnist", "--data-dir", data_dir, "--model", model)
    return rate


def in_memory() -> float:
    """Images per second of the cnn over tensors that lie in memory."""
    rates = _handwritten("pytorch_horovod", "--num-samples", SAMPLES_IN_MEMORY, "--epochs", 3)
    return statistics.median(rates[1:])


def _handwritten(script: str, *flags: object) -> tuple[float, ...]:
    """Images per second of a script's epochs."""
    module = f"allstep.benchmarks.handwritten.{script}"
    with tempfile.TemporaryDirectory() as directory:
        return run_handwritten(
            Path(directory), lambda output: [job(module, output, *flags, "--batch-size", BATCH_SIZE)]
        ).images_per_second


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print the table; end with status 1 where the target is missed."""
    parser = Parser("python -m allstep.benchmarks.input_pipeline", __doc__)
    parser.add_argument("--output", type=output_file, default="runs/input_pipeline.json", help="for raw samples")
    parser.add_argument("--rounds", type=whole(1, MAX_ROUNDS), default=3)
    parser.add_argument("--quick", action="store_true", help="a trial of a few steps, whose figures say nothing")
    flags = parser.parse_args(argv)
    num_rounds = 1 if flags.quick else flags.rounds
    with tempfile.TemporaryDirectory(prefix="allstep-mnist-") as directory:
        data_dir = Path(directory)
        write_idx_files(data_dir, 512 if flags.quick else 60_000)
        measurements = {"no input": in_memory}
        for model in MODELS:
            measurements[model] = functools.partial(trainer, model, data_dir)
            measurements[f"{model}, example"] = functools.partial(example, model, data_dir)
        samples = interleaved(measurements, num_rounds)
    rows = [
        figure("cnn: images/s / by hand with no input", samples, "cnn", "no input", ">= 0.95"),
        *(figure(f"{model}: images/s / example's pipeline", samples, model, f"{model}, example") for model in MODELS),
    ]
    image_rows, image_samples = image_folder.figures(128 if flags.quick else 1024, num_rounds)
    rows += image_rows
    print_table(rows)
    save(flags.output, rows, {**samples, **image_samples})
    if not all(row.reached for row in rows):
        sys.exit(1)


def figure(what: str, samples: dict[str, list[float]], name: str, reference: str, target: str = "") -> Figure:
    """A row of rates."""
    return Figure(
        what,
        statistics.median(samples[name]),
        statistics.median(samples[reference]),
        median_ratio(samples[name], samples[reference]),
        target,
    )


if __name__ == "__main__":
    run_rank(main)
