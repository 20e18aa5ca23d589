"""synthetic: a learnable function of the index, independent of the order of reads, and of any size."""

import hashlib
import tracemalloc

import numpy as np
import pytest

from allstep.common.base.errors import UserError
from allstep.common.data.datasets import DataConfig, load


def synthetic(**flags):
    return load(DataConfig(dataset="synthetic", **flags))


def test_a_sample_depends_on_its_index_alone():
    split = synthetic(synthetic_shape=(9, 7, 3)).train
    indices = np.array([5, 59_999, 0, 5])
    images, labels = split.read(indices, epoch=0)
    assert images.shape == (4, 9, 7, 3) and images.dtype == np.uint8 and labels.dtype == np.int64
    for position, index in enumerate(indices):
        image, label = split.read(np.array([index]), epoch=3)
        assert (image[0] == images[position]).all() and label[0] == labels[position]


def test_samples_never_change():
    # Oracle: a checksum taken when the data set was defined.
    images, labels = synthetic().train.read(np.arange(100), epoch=0)
    assert hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()[:16] == "184e5140fe885813"


def test_a_nearest_pattern_classifier_learned_from_training_samples_is_right_on_validation():
    # Oracle: the simplest learner there is, the mean image of each class.
    dataset = synthetic(synthetic_samples=2000)
    images, labels = dataset.train.read(np.arange(2000), epoch=0)
    means = np.stack([images[labels == label].mean(axis=0) for label in range(10)])
    images, labels = dataset.validation.read(np.arange(len(dataset.validation)), epoch=0)
    distances = ((images[:, None] - means) ** 2).sum(axis=(2, 3, 4))
    assert (distances.argmin(axis=1) == labels).mean() > 0.99


def test_classes_are_balanced_and_moments_are_right():
    dataset = synthetic(synthetic_shape=(8, 8, 2), synthetic_classes=7)
    images, labels = dataset.train.read(np.arange(20_000), epoch=0)
    counts = np.bincount(labels, minlength=7)
    assert ((counts - 20_000 / 7) ** 2 / (20_000 / 7)).sum() < 22.5  # Exceeded once in a thousand times.
    np.testing.assert_allclose(images.mean(axis=(0, 1, 2)) / 255, dataset.mean, atol=2e-3)
    np.testing.assert_allclose(images.std(axis=(0, 1, 2)) / 255, dataset.std, atol=2e-3)


def test_splits_are_disjoint_and_validation_is_the_same_at_any_size():
    small, large = synthetic(synthetic_samples=60_000), synthetic(synthetic_samples=10**9)
    assert len(large.train) == 10**9 and len(large.validation) == 10_000
    seen = {image.tobytes() for image in small.train.read(np.arange(2000), epoch=0)[0]}
    images, _ = small.validation.read(np.arange(2000), epoch=0)
    assert len(seen) == 2000 and not seen & {image.tobytes() for image in images}
    assert (images == large.validation.read(np.arange(2000), epoch=0)[0]).all()


def test_a_thousand_million_samples_take_no_memory():
    tracemalloc.start()
    split = synthetic(synthetic_samples=10**9).train
    images, _ = split.read(np.array([0, 10**9 - 1]), epoch=0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20 and (images[0] != images[1]).any()


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 1), (5, 64, 3)])
def test_any_shape(shape):
    images, _ = synthetic(synthetic_shape=shape).train.read(np.arange(3), epoch=0)
    assert images.shape == (3, *shape)


@pytest.mark.parametrize(
    "flags",
    [
        {"synthetic_shape": (10**6, 10**6, 3)},
        {"synthetic_shape": (10**30, 1, 1)},
        {"synthetic_classes": 10**12},
        {"synthetic_classes": 2**20, "synthetic_shape": (1, 1, 2**16)},
    ],
)
def test_images_and_patterns_that_exceed_the_memory_are_refused(flags):
    with pytest.raises(UserError, match="expected --synthetic-.*, received"):
        synthetic(**flags)
