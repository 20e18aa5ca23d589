"""Code shared by the hand-written loops: the trainer's samples in the trainer's order, flags, and results.

Those on a GPU time blocks of batches in turn with other jobs.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from allstep.benchmarks.figures import Handwritten
from allstep.commands.shared import turns
from allstep.commands.shared.records.files import write_json
from allstep.commands.shared.records.measured import Block, Measured
from allstep.common.config.data_config import DataConfig
from allstep.common.data import datasets
from allstep.common.data.sharding import sample_order

LEARNING_RATE = 0.01
MOMENTUM = 0.9


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags that the loops share."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path, help="JSON file that rank 0 writes")
    parser.add_argument("--num-samples", type=int, required=True, help="synthetic samples per epoch")
    parser.add_argument("--batch-size", type=int, required=True, help="samples per rank and step")
    parser.add_argument("--epochs", type=int, required=True)
    return parser.parse_args(argv)


def trainer_flags(num_samples: int, epochs: int) -> tuple[object, ...]:
    """Return the flags with which a trainer trains like the loops, except for the batch size."""
    return (
        *("--dataset", "synthetic", "--synthetic-samples", num_samples, "--model", "cnn", "--epochs", epochs),
        *("--optimizer", "sgd", "--base-lr", LEARNING_RATE, "--momentum", MOMENTUM),
    )


def epoch_in_memory(
    flags: argparse.Namespace, epoch: int, *, rank: int, world_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return a rank's samples of an epoch in order: normalised float32 (n, height, width, channels), int64 labels."""
    order = sample_order(np.arange(flags.num_samples), flags.num_samples, seed=0, epoch=epoch)
    return in_memory(flags.num_samples, order.reshape(-1, world_size, flags.batch_size)[:, rank].ravel())


def in_memory(num_samples: int, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return synthetic training samples: normalised float32 (n, height, width, channels), int64 labels (n,)."""
    dataset = datasets.load(DataConfig(dataset="synthetic", synthetic_samples=num_samples))
    images, labels = dataset.train.read(indices, epoch=0)
    mean, std = (np.array(values, np.float32) for values in (dataset.mean, dataset.std))
    return (images.astype(np.float32) / 255 - mean) / std, labels


def write(output: Path, *, images_per_second: Sequence[float], losses: Sequence[float] = ()) -> None:
    """Write the result: a rate for each epoch, and the mean loss of each global batch."""
    write_json(output, Handwritten(tuple(images_per_second), tuple(losses)))


def block_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse those flags of `allstep.commands.compare.synthetic` that the loops have, under the same names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=("cnn", "resnet18", "resnet50"), required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--synthetic-shape", type=int, nargs=3, required=True)
    parser.add_argument("--synthetic-classes", type=int, required=True)
    parser.add_argument("--precision", choices=("float32", "bf16"), required=True)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--num-warmup-batches", type=int, required=True)
    parser.add_argument("--num-batches-per-iter", type=int, required=True)
    parser.add_argument("--num-iters", type=int, required=True)
    parser.add_argument("--turns", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(argv)


def time_blocks(flags: argparse.Namespace, step: Callable[[], object], wait: Callable[[], None]) -> None:
    """Warm up, time each block in its turn, and write the blocks like `allstep.commands.compare.synthetic`.

    `step` trains on one batch, and may return before the work is done; `wait` returns when all work is done.
    """
    for _ in range(flags.num_warmup_batches):
        step()
    wait()
    wait_for_turn = turns.join(flags.turns, 1)
    seconds = []
    for _ in range(flags.num_iters):
        wait_for_turn()
        started = time.perf_counter()
        for _ in range(flags.num_batches_per_iter):
            step()
        wait()
        seconds.append(time.perf_counter() - started)
    wait_for_turn()
    num_images = flags.batch_size * flags.num_batches_per_iter
    blocks = tuple(Block(num_images, (one,)) for one in seconds)
    write_json(flags.output, Measured(blocks, (), first_step_at=None, epochs=None))
