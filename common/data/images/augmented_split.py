"""Training samples as training sees them under --rand-augment, --random-erasing, --mixup and --cutmix.

All of it depends on (seed, epoch, index) alone, so it is the same in both frameworks, on any number of ranks and after
a resume. The partner of a sample is the one at its index in a permutation of the epoch's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.base import Dataset, Split
from allstep.common.data.datasets.hashing import uniform_draws
from allstep.common.data.images import rand_augment
from allstep.common.data.images.mixing import NUM_ERASE_DRAWS, NUM_MIX_DRAWS, erase, mix
from allstep.common.data.sharding import sample_order

# Draws and permutations have numbers of epochs that no other ones have.
_RAND_AUGMENT, _ERASE, _MIX, _PARTNERS = (number * 2**48 for number in range(1, 5))


@dataclass(frozen=True)
class Augmentation:
    """What is done to training images; see DataConfig for the numbers."""

    mixup: float
    cutmix: float
    random_erasing: float
    rand_augment: int
    seed: int
    num_classes: int

    @property
    def mixes(self) -> bool:
        """Whether targets are shares of the classes, float32 (n, num_classes)."""
        return bool(self.mixup or self.cutmix)


class AugmentedSplit:
    """A split of images and classes, changed and mixed."""

    def __init__(self, split: Split, augmentation: Augmentation) -> None:
        self._split, self._flags = split, augmentation
        self.parallel = split.parallel or augmentation.rand_augment > 0  # which is slow, too

    def __len__(self) -> int:
        return len(self._split)

    def read(self, indices: np.ndarray, *, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        flags = self._flags
        images, classes = self._changed(indices, epoch)
        if not flags.mixes:
            return images, classes
        partners = sample_order(indices, len(self), seed=flags.seed, epoch=epoch + _PARTNERS)
        others, other_classes = self._changed(partners, epoch)
        draws = uniform_draws(indices, NUM_MIX_DRAWS, seed=flags.seed, epoch=epoch + _MIX)
        images, shares = mix(images, others, draws, mixup=flags.mixup, cutmix=flags.cutmix)
        targets = np.zeros((len(indices), flags.num_classes), np.float32)
        rows = np.arange(len(indices))
        targets[rows, classes] = shares
        targets[rows, other_classes] += (1 - shares).astype(np.float32)
        return images, targets

    def _changed(self, indices: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Images, each by itself, and classes."""
        flags = self._flags
        images, classes = self._split.read(indices, epoch=epoch)
        if flags.rand_augment:
            num_draws = rand_augment.num_draws(flags.rand_augment)
            draws = uniform_draws(indices, num_draws, seed=flags.seed, epoch=epoch + _RAND_AUGMENT)
            images = rand_augment.rand_augment(images, draws)
        if flags.random_erasing:
            draws = uniform_draws(indices, NUM_ERASE_DRAWS, seed=flags.seed, epoch=epoch + _ERASE)
            images = erase(images, draws, flags.random_erasing)
        return images, classes


def augmentation_of(flags: DataConfig, dataset: Dataset) -> Augmentation | None:
    """What flags have done to the training images of a data set; None where they leave them alone.

    Raises:
        UserError: the data set has no images of one channel or three, or no classes.
    """
    names = [name for name in ("mixup", "cutmix", "random_erasing", "rand_augment") if getattr(flags, name)]
    if not names:
        return None
    are_images = dataset.input_type == "uint8" and len(dataset.input_shape) == 3 and dataset.input_shape[-1] in (1, 3)
    if not are_images or dataset.task != "classification":
        raise UserError(
            f"expected images of classes, in one channel or three, for --{names[0].replace('_', '-')}, received "
            f"{dataset.input_type} of shape {dataset.input_shape} for {dataset.task}; leave it out"
        )
    return Augmentation(
        flags.mixup, flags.cutmix, flags.random_erasing, flags.rand_augment, flags.seed, dataset.num_classes
    )
