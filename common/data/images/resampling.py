"""Resizing of a box of an image with Pillow's bilinear filter, whose support grows when an image is reduced.

On x86-64 cykooz_resizer uses vector instructions and takes a third of Pillow's time; its values differ by at most 1.
It has no wheels for other platforms, which use Pillow.
"""

from __future__ import annotations

import functools
import math
import platform
from collections.abc import Callable
from typing import Any

import numpy as np

from allstep.common.data.images.crop import Box

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
