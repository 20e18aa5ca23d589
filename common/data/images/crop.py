"""Crops of images, as pure functions of the image's size and of random numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

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

    Its area is 8% to 100% of the image's, its ratio of width to height 3/4 to 4/3 (Szegedy et al., "Going
    Deeper with Convolutions", CVPR 2015, section 6). As in the reference implementations, the largest possible
    box in the centre is taken if none of ten random boxes fits.

    Args:
        draws: `NUM_CROP_DRAWS` numbers, uniform in [0, 1).
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
