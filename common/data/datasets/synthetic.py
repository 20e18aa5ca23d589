"""synthetic: images of any shape and number, computed from their index; for benchmarks and tests of scale.

Each class has a pattern, a coarse grid of probabilities; a pixel is white with the probability of its cell,
black otherwise. So a network can learn the classes, with almost no errors from 28x28 pixels on. Patterns and
pixels come from a hash of counters: 10^9 samples take no memory, and every rank computes the same ones.
"""

import math

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.base.random_state import hash64
from allstep.common.base.resources import available_memory
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.base import Dataset

GRID = 4
"""Cells of a pattern in each direction; coarse, so that the pattern survives pooling."""
MAX_SAMPLES = 2**40
"""First index of the validation samples, so that they never overlap with or depend on the training samples."""
PATTERN_COUNTER = 2**63
"""First counter of the patterns, above those of any sample."""
MAX_VALIDATION_SAMPLES = 10_000
BYTES_PER_NUMBER = 16
"""Peak memory per number of an image or a pattern: a hash of 64 bits, and a copy."""
READ_AHEAD_BYTES = 2**15
"""Image size from which prefetching pays: computing a smaller image costs less than passing it between threads."""


def prepare(config: DataConfig) -> None:
    """Do nothing: samples are computed when read."""


def load(config: DataConfig) -> Dataset:
    """Return the data set that the `synthetic_*` flags ask for.

    Raises UserError if an image or the classes' patterns do not fit into memory.
    """
    shape, num_samples, num_classes = config.synthetic_shape, config.synthetic_samples, config.synthetic_classes
    num_bytes = BYTES_PER_NUMBER * (math.prod(shape) + GRID**2 * num_classes * shape[2])
    if num_bytes > (left := available_memory()):
        raise UserError(
            f"expected --synthetic-shape and --synthetic-classes to fit into {left} bytes, the memory that is left, "
            f"received {_shown(shape)} and {num_classes}, which take {num_bytes}"
        )

    patterns = class_patterns(num_classes, shape[2])
    # Over all classes and cells, a pixel is white with the mean probability of its channel.
    mean = patterns.mean(axis=(0, 1, 2)) / 256
    std = np.sqrt(mean * (1 - mean))
    num_validation = min(MAX_VALIDATION_SAMPLES, max(1, num_samples // 6))
    return Dataset(
        train=SyntheticSplit(num_samples, first=0, shape=shape, patterns=patterns),
        validation=SyntheticSplit(num_validation, first=MAX_SAMPLES, shape=shape, patterns=patterns),
        input_shape=shape,
        num_classes=num_classes,
        mean=tuple(mean.tolist()),
        std=tuple(std.tolist()),
    )


def _shown(shape: tuple[int, ...]) -> str:
    return " ".join(map(str, shape))


def class_patterns(num_classes: int, channels: int) -> np.ndarray:
    """Return the probabilities of white for each class, in 1/256, uint8 (num_classes, GRID, GRID, channels).

    The probabilities are squares of uniform numbers, at most a quarter: mostly black images like those of MNIST
    keep training stable at MNIST's usual learning rates.
    """
    size = (num_classes, GRID, GRID, channels)
    counters = np.arange(np.prod(size), dtype=np.uint64) + np.uint64(PATTERN_COUNTER)
    roots = hash64(counters) >> np.uint64(57)
    return (roots * roots >> np.uint64(8)).astype(np.uint8).reshape(size)


class SyntheticSplit:
    """Split with the samples `first`, `first + 1`, ... of one endless sequence."""

    def __init__(self, num_samples: int, *, first: int, shape: tuple[int, int, int], patterns: np.ndarray) -> None:
        height, width, channels = shape
        self.num_samples = num_samples
        self.first = np.uint64(first)
        self.shape = shape
        self.patterns = patterns
        self.num_pixels = height * width * channels
        # The first hash gives the label, each further one the noise of eight pixels.
        self.counters = np.arange(1 + -(-self.num_pixels // 8), dtype=np.uint64)
        self.rows = np.arange(height) * GRID // height
        self.columns = np.arange(width) * GRID // width
        self.parallel = self.num_pixels >= READ_AHEAD_BYTES

    def __len__(self) -> int:
        return self.num_samples

    def read(self, indices: np.ndarray, *, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        start = (np.asarray(indices).astype(np.uint64) + self.first) * np.uint64(len(self.counters))
        bits = hash64(start[:, None] + self.counters)
        labels = (bits[:, 0] % np.uint64(len(self.patterns))).astype(np.int64)
        # Columns first: then each of the image's rows is one contiguous copy.
        patterns = self.patterns[labels].take(self.columns, axis=2).take(self.rows, axis=1)
        noise = bits[:, 1:].view(np.uint8)[:, : self.num_pixels].reshape(patterns.shape)
        return (noise < patterns).view(np.uint8) * np.uint8(255), labels
