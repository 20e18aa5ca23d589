"""Crops of images, as pure functions of the image's size and of random numbers, and their resizing."""

import functools
import math
import platform
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Box = tuple[float, float, float, float]
"""Edges of a crop in pixels: left, top, right, bottom."""

NUM_ATTEMPTS = 10
NUM_CROP_DRAWS = 2 * NUM_ATTEMPTS + 2
"""Random numbers that one crop needs: area and aspect ratio of each attempt, then the position."""
MIN_AREA, MAX_AREA = 0.08, 1.0
MIN_RATIO, MAX_RATIO = 3 / 4, 4 / 3
CENTRE_FRACTION = 224 / 256


def random_resized_box(width: int, height: int, draws: Sequence[float]) -> Box:
    """Return a box of random area, aspect ratio and position within an image of `width` x `height` pixels.

    Its area is 8% to 100% of the image's, its ratio of width to height 3/4 to 4/3 (Szegedy et al., "Going Deeper with
    Convolutions", CVPR 2015, section 6). As in the reference implementations, the largest possible box in the centre is
    taken if none of ten random boxes fits. `draws` are `NUM_CROP_DRAWS` numbers, uniform in [0, 1).
    """
    for attempt in range(NUM_ATTEMPTS):
        area = width * height * (MIN_AREA + draws[2 * attempt] * (MAX_AREA - MIN_AREA))
        ratio = MIN_RATIO * (MAX_RATIO / MIN_RATIO) ** draws[2 * attempt + 1]
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            left = int(draws[-2] * (width - box_width + 1))
            top = int(draws[-1] * (height - box_height + 1))
            return left, top, left + box_width, top + box_height
    return _centred(width, height, min(width, height * MAX_RATIO), min(height, width / MIN_RATIO))


def centre_box(width: int, height: int) -> Box:
    """Return the square in the centre whose side is 224/256 of the image's shorter side.

    Resizing it to 224 pixels is equivalent to resizing the shorter side to 256 and cropping the central 224 pixels.
    """
    side = min(width, height) * CENTRE_FRACTION
    return _centred(width, height, side, side)


def _centred(width: int, height: int, box_width: float, box_height: float) -> Box:
    left, top = (width - box_width) / 2, (height - box_height) / 2
    return left, top, left + box_width, top + box_height


# Pillow's bilinear filter, whose support grows when an image is reduced. On x86-64, cykooz_resizer uses vector
# instructions and takes a third of Pillow's time; its values differ by at most 1. It has no wheels for others.
VECTORS = platform.machine() == "x86_64"
"""Whether cykooz_resizer is used."""

Resample = Callable[[np.ndarray, Box], np.ndarray]


def resampler(size: int) -> Resample:
    """Return a function for one thread that resizes a box of uint8 (height, width, 3) to uint8 (size, size, 3)."""
    return _vectorised(size) if VECTORS else functools.partial(by_pillow, size=size)


def _vectorised(size: int) -> Resample:
    from cykooz_resizer import CropBox, FilterType, ImageData, PixelType, ResizeAlg, ResizeOptions, Resizer

    resizer = Resizer()
    resized = ImageData(size, size, PixelType.U8x3)
    bilinear = ResizeAlg.convolution(FilterType.bilinear)

    def resample(pixels: np.ndarray, box: Box) -> np.ndarray:
        pixels, (left, top, right, bottom) = cut(pixels, box, size)
        height, width, _ = pixels.shape
        # Rounding errors may push a box at the edge beyond it.
        crop = CropBox(left, top, min(right - left, width - left), min(bottom - top, height - top))
        source = ImageData(width, height, PixelType.U8x3, pixels.tobytes())
        resizer.resize(source, resized, ResizeOptions(resize_alg=bilinear, crop_box=crop))
        return np.frombuffer(resized.get_buffer(), dtype=np.uint8).reshape(size, size, 3)

    return resample


def by_pillow(pixels: np.ndarray, box: Box, size: int) -> np.ndarray:
    """Resize with Pillow, which gives the same result as cykooz_resizer but takes longer."""
    from PIL import Image

    pixels, box = cut(pixels, box, size)
    return np.asarray(Image.fromarray(pixels).resize((size, size), Image.Resampling.BILINEAR, box=box))


def cut(pixels: Any, box: Box, size: int) -> tuple[Any, Box]:
    """Cut out what the filter needs to resize the box to `size` pixels, and return it with the box's position in it.

    `pixels` is an array or a tensor (height, width, 3).
    """
    left, top, right, bottom = box
    x = math.ceil(max((right - left) / size, 1))
    y = math.ceil(max((bottom - top) / size, 1))
    x0, y0 = max(math.floor(left) - x, 0), max(math.floor(top) - y, 0)
    part = pixels[y0 : math.ceil(bottom) + y, x0 : math.ceil(right) + x]
    return part, (left - x0, top - y0, right - x0, bottom - y0)
