"""Augmented and mixed training images. Oracles: SciPy, Pillow, and pixels that identify their origin."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import scipy  # scipy.stats is imported when it is used
from PIL import Image, ImageEnhance

from allstep.common.base.errors import UserError
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.base import ArraySplit, Dataset
from allstep.common.data.images.augmented_split import (
    Augmentation,
    AugmentedSplit,
    augmentation_of,
    erase,
    mix,
    rand_augment,
)

NUM_SAMPLES, NUM_CLASSES = 60, 6
# Each image has its own colour, which determines its class.
SPLIT = ArraySplit(
    np.broadcast_to(4 * np.arange(NUM_SAMPLES, dtype=np.uint8)[:, None, None, None], (NUM_SAMPLES, 16, 12, 3)).copy(),
    np.arange(NUM_SAMPLES) % NUM_CLASSES,
)
NOTHING = Augmentation(mixup=0.0, cutmix=0.0, random_erasing=0.0, rand_augment=0, seed=3, num_classes=NUM_CLASSES)
ALL = dataclasses.replace(NOTHING, mixup=0.4, cutmix=1.0, random_erasing=0.5, rand_augment=2)


def read(flags: Augmentation, *, epoch: int = 1) -> tuple[np.ndarray, np.ndarray]:
    return AugmentedSplit(SPLIT, flags).read(np.arange(NUM_SAMPLES), epoch=epoch)


def test_a_sample_depends_on_seed_epoch_and_index_alone():
    images, targets = read(ALL)
    indices = np.array([7, 3, 59, 3])
    some_images, some_targets = AugmentedSplit(SPLIT, ALL).read(indices, epoch=1)
    assert np.array_equal(some_images, images[indices]) and np.array_equal(some_targets, targets[indices])
    for other, _ in (read(ALL, epoch=2), read(dataclasses.replace(ALL, seed=4))):
        assert not np.array_equal(other, images)
    assert np.array_equal(SPLIT.inputs[:, 0, 0, 0], 4 * np.arange(NUM_SAMPLES))  # the data set is unchanged


def test_mixup_adds_up_images_and_labels_in_the_same_shares():
    draws = np.random.default_rng(0).random((NUM_SAMPLES, 4))
    partners = SPLIT.inputs[::-1]
    mixed, shares = mix(SPLIT.inputs, partners, draws, mixup=0.4, cutmix=0.0)
    assert shares == pytest.approx(scipy.stats.beta(0.4, 0.4).ppf(draws[:, 1]), abs=1e-9)
    expected = shares[:, None, None, None] * SPLIT.inputs + (1 - shares[:, None, None, None]) * partners
    assert np.abs(mixed - expected).max() <= 0.5 + 1e-3


def test_cutmix_has_labels_in_the_shares_of_the_pixels():
    images, targets = read(dataclasses.replace(NOTHING, cutmix=1.0))
    own = (images == SPLIT.inputs).mean(axis=(1, 2, 3))
    assert 0.3 < own.mean() < 0.9 and 0 < own.min() < 0.3
    for number, image in enumerate(images):
        shares = np.zeros(NUM_CLASSES)
        for colour, count in zip(*np.unique(image[:, :, 0], return_counts=True), strict=True):
            shares[colour // 4 % NUM_CLASSES] += count / image[:, :, 0].size
        assert targets[number] == pytest.approx(shares, abs=1e-6)


def test_with_both_each_sample_has_one_of_them():
    draws = np.random.default_rng(1).random((NUM_SAMPLES, 4))
    mixed, shares = mix(SPLIT.inputs, SPLIT.inputs[::-1], draws, mixup=0.4, cutmix=1.0)
    for ways, flags in ((draws[:, 0] < 0.5, {"cutmix": 1.0}), (draws[:, 0] >= 0.5, {"mixup": 0.4})):
        alone = mix(SPLIT.inputs, SPLIT.inputs[::-1], draws, **{"mixup": 0.0, "cutmix": 0.0, **flags})
        assert (
            ways.any() and np.array_equal(mixed[ways], alone[0][ways]) and np.array_equal(shares[ways], alone[1][ways])
        )


def test_erasing_makes_noise_of_a_box_in_a_share_of_the_images():
    draws = np.random.default_rng(2).random((NUM_SAMPLES, 5))
    blank = np.zeros((NUM_SAMPLES, 32, 32, 1), np.uint8)
    erased = erase(blank, draws, 0.4)
    changed = erased.any(axis=(1, 2, 3))
    assert np.array_equal(changed, draws[:, 0] < 0.4) and not blank.any()
    for image in erased[changed, :, :, 0]:
        rows, columns = np.flatnonzero(image.any(axis=1)), np.flatnonzero(image.any(axis=0))
        box = image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert 0.01 <= box.size / image.size <= 0.45 and (box == 0).mean() < 0.2  # 1 of 256 is 0 by chance


@pytest.mark.parametrize(("choice", "factor"), [(7.5 / 9, 1 + 0.9 * 0.3), (8.5 / 9, 1 + 0.9 * 0.3)])
def test_operations_are_pillows(choice, factor):
    enhancement = {7: ImageEnhance.Brightness, 8: ImageEnhance.Sharpness}[int(choice * 9)]
    images = np.random.default_rng(3).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
    expected = [np.asarray(enhancement(Image.fromarray(image)).enhance(factor)) for image in images]
    assert np.array_equal(rand_augment(images, np.full((2, 2), [choice, 0.2])), expected)
    grey = rand_augment(images[:, :, :, :1], np.full((2, 2), [choice, 0.2]))
    assert grey.shape == (2, 8, 8, 1)


def test_only_images_of_classes_are_changed():
    flags = DataConfig(mixup=0.2)
    images = Dataset(SPLIT, SPLIT, (16, 12, 3), NUM_CLASSES)
    assert augmentation_of(DataConfig(), images) is None
    assert dataclasses.replace(images, augmentation=augmentation_of(flags, images)).mixes_targets
    for dataset in (
        dataclasses.replace(images, input_type="float32"),
        dataclasses.replace(images, input_shape=(5,)),
        dataclasses.replace(images, task="regression"),
    ):
        with pytest.raises(UserError, match="expected images of classes.* for --mixup, received .*; leave it out"):
            augmentation_of(flags, dataset)
