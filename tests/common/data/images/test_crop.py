"""augment: the crops of Szegedy et al. (2015), within the image, and the centre crop."""

import numpy as np
import pytest

from allstep.common.data.images.crop import NUM_CROP_DRAWS, centre_box, random_resized_box


def boxes(width: int, height: int, count: int = 4000) -> np.ndarray:
    draws = np.random.default_rng(0).random((count, NUM_CROP_DRAWS))
    return np.array([random_resized_box(width, height, row) for row in draws.tolist()])


@pytest.mark.parametrize(("width", "height"), [(500, 375), (224, 224), (640, 480)])
def test_area_and_ratio_have_the_papers_range_and_fill_it(width, height):
    left, top, right, bottom = boxes(width, height).T
    assert left.min() == 0 and top.min() == 0 and right.max() == width and bottom.max() == height
    area = (right - left) * (bottom - top) / (width * height)
    ratio = (right - left) / (bottom - top)
    # Tolerance of one pixel: boxes lie on whole pixels.
    assert 0.078 < area.min() < 0.1 and 0.9 < area.max() <= 1
    assert 0.735 < ratio.min() < 0.77 and 1.3 < ratio.max() < 1.36


def test_ratios_are_symmetric_and_areas_uniform():
    # Oracle: in a large square image wide and tall are equally likely, and the areas of small boxes, which
    # always fit, are uniform. Chi-square of 10 bins; 27.9 is exceeded once in a thousand times.
    left, top, right, bottom = boxes(2000, 2000).T
    assert abs((right - left > bottom - top).mean() - 0.5) < 0.03
    area = (right - left) * (bottom - top) / 2000**2
    counts = np.histogram(area, bins=10, range=(0.08, 0.7))[0]
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 27.9


@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 7), (2, 3), (1000, 3), (3, 1000)])
def test_boxes_lie_within_images_of_any_shape(width, height):
    left, top, right, bottom = boxes(width, height, count=200).T
    assert (left >= 0).all() and (top >= 0).all() and (right <= width).all() and (bottom <= height).all()
    assert (right > left).all() and (bottom > top).all()


def test_a_strip_gets_the_largest_box_in_its_centre():
    # No box of 8% of the area and a ratio of 3/4 to 4/3 fits; the largest with such a ratio is 4 x 3.
    np.testing.assert_allclose(boxes(1000, 3, count=1)[0], (498, 0, 502, 3))
    np.testing.assert_allclose(boxes(3, 1000, count=1)[0], (0, 498, 3, 502))


def test_centre_box():
    assert centre_box(256, 256) == (16, 16, 240, 240)
    assert centre_box(512, 256) == (144, 16, 368, 240)
    assert centre_box(256, 512) == (16, 144, 240, 368)
