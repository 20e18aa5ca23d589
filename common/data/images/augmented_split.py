"""Augmentation of training images: --rand-augment, --random-erasing, --mixup and --cutmix.

The result depends only on (seed, epoch, index), so it is the same in both frameworks, on any number of ranks and after
a resume. Each epoch has a permutation of the samples that assigns every sample the partner it is mixed with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.base.random_state import hash64, uniform_draws
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.base import Dataset, Split
from allstep.common.data.sharding import sample_order

if TYPE_CHECKING:
    from PIL.Image import Image


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
            num_draws = 2 * flags.rand_augment  # operation and direction of each change
            draws = uniform_draws(indices, num_draws, seed=flags.seed, epoch=epoch + _RAND_AUGMENT)
            images = rand_augment(images, draws)
        if flags.random_erasing:
            draws = uniform_draws(indices, NUM_ERASE_DRAWS, seed=flags.seed, epoch=epoch + _ERASE)
            images = erase(images, draws, flags.random_erasing)
        return images, classes


def augmentation_of(flags: DataConfig, dataset: Dataset) -> Augmentation | None:
    """Return the augmentation that the flags ask for, or None if they ask for none.

    Raises UserError if the samples of the data set are not images with 1 or 3 channels, or have no classes.
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


NUM_MIX_DRAWS = 4
"""Random numbers that mixing needs per sample: mixup or CutMix, the share, and the position of the box."""
NUM_ERASE_DRAWS = 5
"""Random numbers that erasing needs per sample: whether to erase, area, aspect ratio, and position of the box."""
_MIN_AREA, _MAX_AREA = 0.02, 0.4
_MIN_RATIO = 0.3


def mix(
    images: np.ndarray, partners: np.ndarray, draws: np.ndarray, *, mixup: float, cutmix: float
) -> tuple[np.ndarray, np.ndarray]:
    """Mix each image with its partner.

    Mixup adds both, pixel by pixel, with weights L and 1 - L, where L is drawn from Beta(mixup, mixup) (Zhang et al.,
    "mixup: Beyond Empirical Risk Minimization", ICLR 2018, section 2). CutMix replaces a box of the image by the same
    box of its partner; the box has the share 1 - L of the area, less if it crosses the edge (Yun et al., "CutMix", ICCV
    2019, section 3.1). If both are on, each sample is mixed by one of them, chosen with equal probability.

    Args:
        images: uint8 (n, height, width, channels).
        partners: uint8 (n, height, width, channels).
        draws: (n, NUM_MIX_DRAWS), uniform in [0, 1).
        mixup: parameter of the Beta distribution of mixup; 0 turns mixup off.
        cutmix: parameter of the Beta distribution of CutMix; 0 turns CutMix off.

    Returns: the mixed images, and the share (n,) of the original image in each.
    """
    from scipy.special import betaincinv

    cuts = (draws[:, 0] < 0.5) if mixup and cutmix else np.full(len(images), not mixup)
    parameters = np.where(cuts, cutmix, mixup)
    shares = betaincinv(parameters, parameters, draws[:, 1])
    weights = shares[:, None, None, None].astype(np.float32)
    mixed = np.rint(images * weights + partners * (1 - weights)).astype(np.uint8)
    for number in np.flatnonzero(cuts):
        mixed[number], shares[number] = _cut(images[number], partners[number], shares[number], draws[number, 2:])
    return mixed, shares


def _cut(image: np.ndarray, partner: np.ndarray, share: float, placement: np.ndarray) -> tuple[np.ndarray, float]:
    sides, centre = np.array(image.shape[:2]) * np.sqrt(1 - share), np.array(image.shape[:2]) * placement
    low = np.clip(np.rint(centre - sides / 2).astype(int), 0, image.shape[:2])
    high = np.clip(np.rint(centre + sides / 2).astype(int), 0, image.shape[:2])
    box = slice(low[0], high[0]), slice(low[1], high[1])
    mixed = image.copy()
    mixed[box] = partner[box]
    return mixed, 1 - float(np.prod(high - low)) / float(np.prod(image.shape[:2]))


def erase(images: np.ndarray, draws: np.ndarray, probability: float) -> np.ndarray:
    """Replace a box by noise in some of the images (Zhong et al., "Random Erasing Data Augmentation", AAAI 2020).

    The box has 2 % to 40 % of the image's area and an aspect ratio of 0.3 to 1 / 0.3, less if it does not fit.

    Args:
        images: uint8 (n, height, width, channels).
        draws: (n, NUM_ERASE_DRAWS), uniform in [0, 1).
        probability: probability that an image is changed.
    """
    erased = images.copy()
    height, width = images.shape[1:3]
    for number in np.flatnonzero(draws[:, 0] < probability):
        _, area_draw, ratio_draw, top_draw, left_draw = draws[number]
        area = height * width * (_MIN_AREA + area_draw * (_MAX_AREA - _MIN_AREA))
        ratio = _MIN_RATIO ** (1 - 2 * ratio_draw)
        box_height = int(np.clip(round(np.sqrt(area * ratio)), 1, height))
        box_width = int(np.clip(round(np.sqrt(area / ratio)), 1, width))
        top, left = int(top_draw * (height - box_height + 1)), int(left_draw * (width - box_width + 1))
        box = erased[number, top : top + box_height, left : left + box_width]
        box[:] = _noise(draws[number], box.shape)
    return erased


def _noise(draws: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return pseudo-random uint8 pixels that depend only on a sample's draws."""
    key = hash64(draws.view(np.uint64)).sum(dtype=np.uint64)
    return (hash64(key + np.arange(np.prod(shape), dtype=np.uint64)) >> np.uint64(56)).astype(np.uint8).reshape(shape)


_STRENGTH = 9 / 30


def rand_augment(images: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Apply random changes of colours and sharpness to images, uint8 (n, height, width, 1 or 3).

    `draws`, uniform in [0, 1), are (n, 2 * number of changes). The changes are those of Cubuk et al. 2020,
    "RandAugment", section 3, with magnitude 9 of 30 as used there for ResNet-50. Rotations, shears and translations are
    left out: data sets crop and flip by themselves, and images whose orientation matters, such as digits, must keep
    their labels.
    """
    from PIL import Image

    operations, changed = _operations(), np.empty_like(images)
    for pixels, numbers, out in zip(images, draws, changed, strict=True):
        image = Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels)
        for choice, direction in numbers.reshape(-1, 2):
            operation = operations[int(choice * len(operations))]
            image = operation(image, _STRENGTH if direction < 0.5 else -_STRENGTH)
        out[:] = np.asarray(image).reshape(pixels.shape)
    return changed


@functools.cache
def _operations() -> tuple[Callable[[Image, float], Image], ...]:
    """Return the operations on an image by a strength from -1 to 1."""
    from PIL import ImageEnhance, ImageOps

    def enhancing(kind: Callable[[Image], ImageEnhance._Enhance]) -> Callable[[Image, float], Image]:
        return lambda image, strength: kind(image).enhance(1 + 0.9 * strength)

    return (
        lambda image, _: image,
        lambda image, _: ImageOps.autocontrast(image),
        lambda image, _: ImageOps.equalize(image),
        lambda image, strength: ImageOps.posterize(image, 8 - round(4 * abs(strength))),  # keeps the upper bits
        lambda image, strength: ImageOps.solarize(image, round(256 * (1 - abs(strength)))),  # inverts above a threshold
        *map(enhancing, (ImageEnhance.Color, ImageEnhance.Contrast, ImageEnhance.Brightness, ImageEnhance.Sharpness)),
    )
