"""resampling: vector instructions compute what Pillow does. Oracle: Pillow on the whole image, within 1 of 255."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from allstep.common.data.images.crop import VECTORS, by_pillow, cut, resampler

NOISE = np.random.default_rng(0).integers(0, 256, (375, 500, 3), dtype=np.uint8)


def boxes(count: int) -> list[tuple[float, float, float, float]]:
    """Return boxes at whole and fractional pixels, in the middle and at every edge, from one pixel to the image."""
    rng = np.random.default_rng(1)
    x = np.sort(rng.uniform(0, 500, (count, 2)))
    y = np.sort(rng.uniform(0, 375, (count, 2)))
    found = [
        (left, top, max(right, left + 1), max(bottom, top + 1))
        for (left, right), (top, bottom) in zip(x, y, strict=True)
    ]
    whole = [tuple(float(round(side)) for side in box) for box in found if box[2] - box[0] > 2 and box[3] - box[1] > 2]
    over = np.nextafter([500.0, 375.0], np.inf).tolist()  # a box that was scaled with its image may end here
    edges = [
        (0, 0, *over),
        (17.5, 99.9, *over),
        (0, 0, 500, 375),
        (0, 0, 1, 1),
        (499, 374, 500, 375),
        (250.3, 187.9, 500, 375),
        (0, 0, 33.3, 22.2),
    ]
    return [*(b for b in found if b[2] <= 500 and b[3] <= 375), *whole, *edges]


@pytest.mark.skipif(not VECTORS, reason="cykooz_resizer is used on x86-64 alone")
@pytest.mark.parametrize("size", [1, 7, 32, 224, 600])
def test_vector_instructions_compute_what_pillow_does(size):
    resample = resampler(size)
    for box in boxes(30):
        resized = resample(NOISE, box)
        assert resized.shape == (size, size, 3) and resized.dtype == np.uint8
        expected = np.asarray(Image.fromarray(NOISE).resize((size, size), Image.Resampling.BILINEAR, box=box))
        assert np.abs(resized.astype(int) - expected).max() <= 1, box


@pytest.mark.parametrize("size", [1, 7, 32, 224])
def test_a_part_of_the_image_is_enough(size):
    for box in boxes(30):
        expected = np.asarray(Image.fromarray(NOISE).resize((size, size), Image.Resampling.BILINEAR, box=box))
        assert np.abs(by_pillow(NOISE, box, size).astype(int) - expected).max() <= 1, box
    part, _ = cut(NOISE, (200, 100, 300, 150), 50)
    assert part.shape[0] < 60 and part.shape[1] < 110


def test_what_is_returned_is_not_written_to_again():
    resample = resampler(16)
    first = resample(NOISE, (0, 0, 100, 100))
    kept = first.copy()
    resample(NOISE, (100, 100, 300, 300))
    np.testing.assert_array_equal(first, kept)
