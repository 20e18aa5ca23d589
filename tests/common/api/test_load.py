"""Trained runs as objects. Oracles: the samples of the data set, the checkpoint's weights, and the bare network."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import torch
from PIL import Image
from ranks import REPOSITORY, train

import allstep
from allstep.common.base.errors import UserError
from allstep.common.checkpoint import load as load_state
from allstep.common.config.data_config import DataConfig
from allstep.common.data import datasets


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures of several sizes and kinds, some so large that JPEG files are decoded at a reduced size."""
    folder, draws = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for part in ("train", "val"):
        for number, name in enumerate(("cat", "dog")):
            (folder / part / name).mkdir(parents=True)
            for index, side in enumerate((20, 90, 33)):
                pixels = draws.integers(0, 99, (side, side + 7, 3)).astype(np.uint8) + 60 * number
                ending = "png" if index == 2 else "jpg"
                Image.fromarray(pixels.astype(np.uint8)).save(folder / part / name / f"{index}.{ending}")
    return folder


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("run") / "run"
    flags = ("--dataset", "image-folder", "--data-dir", folder, "--image-size", 16, "--decode-threads", 1)
    train("pytorch", "alone", 1, output, *map(str, flags), "--epochs", "2", "--ema", "0.5", "--batch-size", "2")
    return output


def test_pictures_become_the_samples_of_validation(run, folder):
    data = DataConfig(dataset="image-folder", data_dir=folder, image_size=16, decode_threads=1)
    split = datasets.load(data).validation
    expected, _ = split.read(np.arange(len(split)), epoch=0)
    trained = allstep.load(run)
    paths = [Path(split.images.name(index)) for index in range(len(split))]
    for pictures in (paths, [Image.open(path) for path in paths], list(map(str, paths))):
        np.testing.assert_array_equal(trained.samples(pictures)[0], expected)
    [png] = [index for index, path in enumerate(paths) if path.name == "2.png" and path.parent.name == "cat"]
    pixels = np.asarray(Image.open(paths[png]))
    for one in (pixels, Image.fromarray(pixels), [pixels]):
        np.testing.assert_array_equal(trained.samples(one)[0][0], expected[png])
    batch = np.stack([pixels, pixels])
    tensor = torch.from_numpy(batch).permute(0, 3, 1, 2)
    for many in (tensor, list(tensor), tf.constant(batch), tensor[0]):  # as torchvision.io.read_image has them
        (found, is_one) = trained.samples(many)
        assert len(found) == 2 - is_one and (found == expected[png]).all()
    mean, std = (torch.tensor(values)[:, None, None] for values in (trained.description.mean, trained.description.std))
    normalised = (torch.from_numpy(expected).permute(0, 3, 1, 2) / 255 - mean) / std
    torch.testing.assert_close(trained.preprocess(paths), normalised, rtol=1e-5, atol=1e-5)


def test_predictions_are_those_of_the_bare_network(run, folder):
    trained = allstep.load(run)
    paths = sorted((folder / "val").glob("*/*"))
    assert not trained.model.training and trained.classes == ("cat", "dog") and trained.config["model"] == "cnn"
    shares = torch.softmax(trained.model(trained.preprocess(paths)), 1).detach().numpy()
    rows = trained.predict(paths, top=1)
    assert [row[0][0] for row in rows] == [trained.classes[index] for index in shares.argmax(1)]
    assert [row[0][1] for row in rows] == pytest.approx(shares.max(1).tolist(), rel=1e-5)
    assert trained.predict(paths[0]) == [
        (name, pytest.approx(share, rel=1e-4)) for name, share in trained.predict(paths)[0]
    ]


def test_weights_load_into_either_framework(run, folder):
    paths = sorted((folder / "val").glob("*/*"))
    before = torch.random.get_rng_state()
    one, other = (allstep.load(run, framework=name, device="cpu") for name in ("pytorch", "tensorflow"))
    assert torch.equal(torch.random.get_rng_state(), before)
    for left, right in zip(one.predict(paths), other.predict(paths), strict=True):
        assert dict(left) == pytest.approx(dict(right), rel=1e-4)
    assert type(other.model).__module__.startswith("keras.")


def test_averages_and_the_best_checkpoint(run):
    state = load_state("best", run / "checkpoints", warn=pytest.fail)
    for group, ema in (("model", False), ("ema", True)):
        weight = allstep.load(run, checkpoint="best", ema=ema).model.state_dict()["fc1.weight"].numpy()
        np.testing.assert_array_equal(weight, state.arrays[f"{group}/fc1.weight"])


def test_a_network_of_the_users_own_is_named_again(tmp_path):
    file = f"{REPOSITORY}/examples/my_model.py:build"
    train("pytorch", "alone", 1, tmp_path / "run", "--model", file, "--epochs", "1")
    with pytest.raises(UserError, match=r"the network of the run is your own \(.*my_model.py:build\); pass it again"):
        allstep.load(tmp_path / "run")
    trained = allstep.load(tmp_path / "run", model=file)
    digits = np.zeros((3, 8, 8), np.uint8)
    assert trained.classes == tuple("0123456789") and len(trained.predict(digits)) == 3
    assert dict(trained.predict(digits[0])) == pytest.approx(dict(trained.predict(digits)[0]), rel=1e-4)
    with pytest.raises(
        UserError, match=r"expected samples uint8 \(8, 8, 1\), as the run was trained on, received uint8"
    ):
        trained.predict(np.zeros((2, 9, 9), np.uint8))
    assert trained.samples(torch.zeros(1, 8, 8, dtype=torch.uint8))[1]
    assert len(trained.predict(torch.zeros(3, 1, 8, 8, dtype=torch.uint8))) == 3
    with pytest.raises(UserError, match="expected a picture of 8 bits a channel, received mode I;16"):
        trained.predict(Image.new("I;16", (8, 8)))
    pictures = [Image.fromarray(np.zeros((side, side), np.uint8)) for side in (8, 9)]
    assert len(trained.predict([pictures[0]] * 2)) == 2
    with pytest.raises(UserError, match=r"received uint8 \(9, 9, 1\)"):
        trained.predict(pictures)


def test_mistakes_are_one_line(run, tmp_path):
    (tmp_path / "bad.jpg").write_bytes(b"no picture")
    trained = allstep.load(run)
    for call, expected in (
        (lambda: allstep.load(tmp_path / "none"), "expected a run, a checkpoint or a .safetensors file at"),
        (lambda: allstep.load(run, framework="jax"), "framework must be pytorch or tensorflow, got jax"),
        (lambda: allstep.load(run, device="tpu"), "device must be one of auto, cpu, cuda, got tpu"),
        (lambda: trained.predict(tmp_path / "bad.jpg"), "expected an image in .*bad.jpg"),
        (lambda: trained.predict([]), "expected at least one sample, received none"),
        (lambda: trained.predict(np.zeros((9, 9, 3), np.uint8), top=0), "top must be 1 or more, got 0"),
        (lambda: trained.predict(np.zeros((9, 9))), "expected a picture as a path, an image of Pillow or uint8"),
    ):
        with pytest.raises(UserError, match=expected):
            call()
    assert dataclasses.is_dataclass(trained.description)
