"""What the hand-written loops share: the trainer's samples in the trainer's order, their flags and their result."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from allstep.commands.shared.records.figures import Handwritten
from allstep.commands.shared.records.files import write_json
from allstep.common.config.data_config import DataConfig
from allstep.common.data import datasets
from allstep.common.data.sharding import sample_order

LEARNING_RATE = 0.01
MOMENTUM = 0.9


def arguments(argv: Sequence[str] | None, strategies: Iterable[str] = ()) -> argparse.Namespace:
    """The flags that the loops share; the strategy comes first where there is a choice."""
    parser = argparse.ArgumentParser()
    if strategies:
        parser.add_argument("strategy", choices=tuple(strategies))
        parser.add_argument("--num-devices", type=int, default=1, help="logical CPU devices of this process")
    parser.add_argument("output", type=Path, help="JSON file that rank 0 writes")
    parser.add_argument("--num-samples", type=int, required=True, help="of the synthetic data set; an epoch's length")
    parser.add_argument("--batch-size", type=int, required=True, help="samples per rank and step")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--compile", action="store_true", help="by torch.compile or XLA")
    return parser.parse_args(argv)


def trainer_flags(num_samples: int, epochs: int) -> tuple[object, ...]:
    """The flags with which a trainer trains what the loops do, but for the batch size."""
    return (
        *("--dataset", "synthetic", "--synthetic-samples", num_samples, "--model", "cnn", "--epochs", epochs),
        *("--optimizer", "sgd", "--base-lr", LEARNING_RATE, "--momentum", MOMENTUM),
    )


def epoch_in_memory(
    num_samples: int, epoch: int, *, batch_size: int, rank: int, world_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """A rank's samples of an epoch, in order: normalised float32 (n, height, width, channels), labels int64 (n,)."""
    order = sample_order(np.arange(num_samples), num_samples, seed=0, epoch=epoch)
    return in_memory(num_samples, order.reshape(-1, world_size, batch_size)[:, rank].ravel())


def in_memory(num_samples: int, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the synthetic training samples: normalised float32 (n, height, width, channels), labels int64 (n,)."""
    dataset = datasets.load(DataConfig(dataset="synthetic", synthetic_samples=num_samples))
    images, labels = dataset.train.read(indices, epoch=0)
    mean, std = (np.array(values, np.float32) for values in (dataset.mean, dataset.std))
    return (images.astype(np.float32) / 255 - mean) / std, labels


def write(output: Path, *, images_per_second: Sequence[float], losses: Sequence[float] = ()) -> None:
    """Write the result: a rate for each epoch, and the mean loss of each global batch."""
    write_json(output, Handwritten(tuple(images_per_second), tuple(losses)))
