"""digits: the same samples as scikit-learn gives, in a split that never changes."""

import hashlib
import subprocess
import sys

import numpy as np

from allstep.common.data.datasets import DataConfig, load, prepare


def test_samples_are_those_of_scikit_learn():
    # Oracle: scikit-learn's own loader.
    from sklearn.datasets import load_digits

    reference = load_digits()
    dataset = load(DataConfig())
    expected = {
        (np.rint(image * 255 / 16).astype(np.uint8).tobytes(), label)
        for image, label in zip(reference.images, reference.target.tolist(), strict=True)
    }
    found = [
        (image.tobytes(), label)
        for split in (dataset.train, dataset.validation)
        for image, label in zip(*split.read(np.arange(len(split)), epoch=0), strict=True)
    ]
    assert len(found) == 1797
    assert set(found) == expected


def test_split_is_fixed_and_balanced():
    # Oracle: checksums taken when the split was defined; a changed split would change published results.
    dataset = load(DataConfig())
    sums = []
    for split in (dataset.train, dataset.validation):
        images, labels = split.read(np.arange(len(split)), epoch=0)
        assert images.dtype == np.uint8 and labels.dtype == np.int64
        sums.append(hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()[:16])
    assert (len(dataset.train), len(dataset.validation)) == (1437, 360)
    assert sums == ["b91746db64e14d19", "83c99461e31a2576"]
    assert np.bincount(dataset.validation.targets).min() >= 35


def test_normalised_training_images_have_mean_0_and_deviation_1():
    dataset = load(DataConfig())
    images, _ = dataset.train.read(np.arange(len(dataset.train)), epoch=0)
    normalised = (images / 255 - np.array(dataset.mean)) / np.array(dataset.std)
    np.testing.assert_allclose([normalised.mean(), normalised.std()], [0, 1], atol=1e-9)


def test_scikit_learn_is_not_imported():
    # The import takes a second, which is the whole allowance for start-up.
    program = (
        "import sys; from allstep.common.data.datasets import *; c = DataConfig(); prepare(c); load(c);"
        "print([name for name in ('sklearn', 'scipy', 'PIL', 'torch', 'tensorflow') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_prepare_needs_no_data_dir(tmp_path):
    prepare(DataConfig(data_dir=tmp_path / "missing"))
    assert not (tmp_path / "missing").exists()
