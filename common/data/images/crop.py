"""Which part of an image the network sees: pure functions of the image's size and of random numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

Box = tuple[float, float, float, float]
"""Left, top, right and bottom in pixels."""

NUM_ATTEMPTS = 10
NUM_CROP_DRAWS = 2 * NUM_ATTEMPTS + 2
"""Random numbers that one crop takes: area and ratio of each attempt, then the place."""
MIN_AREA, MAX_AREA = 0.08, 1.0
MIN_RATIO, MAX_RATIO = 3 / 4, 4 / 3
CENTRE_FRACTION = 224 / 256


def random_resized_box(width: int, height: int, draws: Sequence[float]) -> Box:
    """A box of random area, ratio and place within an image of `width` x `height` pixels.

    Its area is 8% to 100% of the image's, its ratio of width to height 3/4 to 4/3 (Szegedy et al., "Going
    Deeper with Convolutions", CVPR 2015, section 6). Like the reference implementations it makes ten attempts
    to place such a box, and then takes the largest one in the centre.

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
    """The square in the centre whose side is 224/256 of the image's shorter one.

    Resizing it to 224 pixels is what "resize the shorter side to 256, crop the centre 224" does in two steps.
    """
    side = min(width, height) * CENTRE_FRACTION
    return _centred(width, height, side, side)


def _centred(width: int, height: int, box_width: float, box_height: float) -> Box:
    left, top = (width - box_width) / 2, (height - box_height) / 2
    return left, top, left + box_width, top + box_height
