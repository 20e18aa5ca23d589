"""Augmentation of training images: --rand-augment, --random-erasing, --mixup and --cutmix.

The result depends only on (seed, epoch, index), so it is the same in both frameworks, on any number of ranks and after
a resume. Each epoch has a permutation of the samples that assigns every sample the partner it is mixed with.
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

# Added to the epoch, so that these random streams and permutations are independent of all others.
_RAND_AUGMENT, _ERASE, _MIX, _PARTNERS = (number * 2**48 for number in range(1, 5))


@dataclass(frozen=True)
class Augmentation:
    """Settings for the augmentation of training images; `DataConfig` explains the numbers."""

    mixup: float
    cutmix: float
    random_erasing: float
    rand_augment: int
    seed: int
    num_classes: int

    @property
    def mixes(self) -> bool:
        """Whether targets are class probabilities, float32 (n, num_classes), instead of class numbers."""
        return bool(self.mixup or self.cutmix)


class AugmentedSplit:
    """Split of images and class labels that augments and mixes the samples of another split."""

    def __init__(self, split: Split, augmentation: Augmentation) -> None:
        self._split, self._flags = split, augmentation
        self.parallel = split.parallel or augmentation.rand_augment > 0  # RandAugment is slow, too

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
        """Read images and class labels, and apply the augmentations that work on a single image."""
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
    """Return the augmentation that the flags ask for, or None if they ask for none.

    Raises:
        UserError: the samples of the data set are not images with 1 or 3 channels, or have no classes.
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
