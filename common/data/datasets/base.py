"""What the rest of allstep knows of a data set: two splits of uint8 images, and how to normalise them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # flags are read without NumPy, which would take 0.1 s of every mistake and of --help
    import numpy as np


class Split(Protocol):
    """Samples that can be read in any order, any number at a time."""

    parallel: bool
    """True where reading is slow (images are decoded), so that the loader should read ahead in a thread."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def read(self, indices: np.ndarray, *, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Images, uint8 (n, height, width, channels), and labels, int64 (n,), of n sample indices.

        The result depends on the arguments alone; `epoch` (from 0) selects the augmentation, if there is any.
        """
        ...


@dataclass(frozen=True)
class Dataset:
    """A training and a validation split of images of one shape.

    The worker normalises on the device: `(pixel / 255 - mean) / std`, channel by channel.
    """

    train: Split
    validation: Split
    image_shape: tuple[int, int, int]
    """Height, width, channels."""
    num_classes: int
    mean: tuple[float, ...]
    """Of each channel, with pixels scaled to 0..1."""
    std: tuple[float, ...]
    """Of each channel, with pixels scaled to 0..1."""


class ArraySplit:
    """A split whose samples lie in one array or memory map; reading a batch is one indexing operation."""

    parallel = False

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        """Takes uint8 images (samples, height, width, channels) and int64 labels (samples,)."""
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, indices: np.ndarray, *, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        return self.images[indices], self.labels[indices]
