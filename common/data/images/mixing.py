"""Mixup, CutMix and random erasing of the images of a batch, as pure functions of images and random numbers."""

from __future__ import annotations

import numpy as np

from allstep.common.data.datasets.hashing import hash64

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
