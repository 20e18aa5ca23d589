"""RandAugment without geometric operations: a few random changes of colours and sharpness per image.

Cubuk et al., "RandAugment: Practical automated data augmentation with a reduced search space" (NeurIPS 2020), section
3, with magnitude 9 of 30 as used there for ResNet-50. Rotations, shears and translations are left out: data sets crop
and flip by themselves, and images whose orientation matters, such as digits, must keep their labels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

_STRENGTH = 9 / 30


def num_draws(num_operations: int) -> int:
    """Return how many random numbers `rand_augment` needs per sample: operation and direction of each change."""
    return 2 * num_operations


def rand_augment(images: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Apply to images, uint8 (n, height, width, 1 or 3), as many random operations each as there are draws for.

    `draws` are (n, num_draws(...)), uniform in [0, 1).
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
