"""RandAugment without geometric operations: a few random changes of colours and sharpness per image.

Cubuk et al., "RandAugment: Practical automated data augmentation with a reduced search space" (NeurIPS 2020), section
3, with magnitude 9 of 30 as used there for ResNet-50. Rotations, shears and translations are left out: data sets crop
and flip by themselves, and images whose orientation matters, such as digits, must keep their labels.
"""

from __future__ import annotations

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

    changed = np.empty_like(images)
    for pixels, numbers, out in zip(images, draws, changed, strict=True):
        image = Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels)
        for choice, direction in numbers.reshape(-1, 2):
            operation = _OPERATIONS[int(choice * len(_OPERATIONS))]
            image = operation(image, _STRENGTH if direction < 0.5 else -_STRENGTH)
        out[:] = np.asarray(image).reshape(pixels.shape)
    return changed


def _enhance(name: str) -> Callable[[Image, float], Image]:
    """Return an operation that applies one of Pillow's enhancements by the factor 1 + 0.9 * strength."""

    def operation(image: Image, strength: float) -> Image:
        from PIL import ImageEnhance

        return getattr(ImageEnhance, name)(image).enhance(1 + 0.9 * strength)

    return operation


def _identity(image: Image, strength: float) -> Image:
    return image


def _auto_contrast(image: Image, strength: float) -> Image:
    from PIL import ImageOps

    return ImageOps.autocontrast(image)


def _equalize(image: Image, strength: float) -> Image:
    from PIL import ImageOps

    return ImageOps.equalize(image)


def _posterize(image: Image, strength: float) -> Image:
    """Keep the upper bits of each pixel."""
    from PIL import ImageOps

    return ImageOps.posterize(image, 8 - round(4 * abs(strength)))


def _solarize(image: Image, strength: float) -> Image:
    """Invert the pixels above a threshold."""
    from PIL import ImageOps

    return ImageOps.solarize(image, round(256 * (1 - abs(strength))))


_OPERATIONS = (
    *(_identity, _auto_contrast, _equalize, _posterize, _solarize),
    *map(_enhance, ("Color", "Contrast", "Brightness", "Sharpness")),
)
