"""--decode gpu, with torchvision decoding on the CPU. Oracle: the same samples without --decode."""

from __future__ import annotations

from pathlib import Path

import gpus
import numpy as np
import pytest
import torch
from PIL import Image
from ranks import events, last, launch

from allstep.benchmarks.gpu.decode import Decoding
from allstep.benchmarks.gpu.speed import write_images
from allstep.commands.shared.records.files import read_json
from allstep.common.base.errors import UserError
from allstep.common.data.datasets import DataConfig, Dataset, load
from allstep.common.data.images.encoded import EncodedImage
from allstep.pytorch import Session
from allstep.pytorch.jpeg_decoding import JpegDecoder

pytestmark = pytest.mark.launch  # processes write the photographs
CPU = torch.device("cpu")


def open_both(folder: Path, **flags) -> list[Dataset]:
    """Load the data set twice: with --decode cpu, and with --decode gpu, for the worker to decode."""
    config = {"dataset": "image-folder", "data_dir": folder, "decode_threads": 2, **flags}
    return [load(DataConfig(**config, decode=decode)) for decode in ("cpu", "gpu")]


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> Path:
    """Write 16 training images and 10 validation images of 500 x 375 pixels, of which the first two have one colour."""
    folder = tmp_path_factory.mktemp("photographs")
    write_images(folder, 16)
    for label, colour in enumerate([(200, 60, 30), (20, 90, 160)]):
        [file] = (folder / "val" / f"class{label}").glob("*.jpg")
        Image.new("RGB", (500, 375), colour).save(file, quality=90)
    return folder


@pytest.fixture
def mixture(tmp_path) -> Path:
    """Write ordinary JPEG files as class a; class b also has files of each kind that only the CPU decodes."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    for split in ("train", "val"):
        for name in "ab":
            (tmp_path / split / name).mkdir(parents=True)
            image.save(tmp_path / split / name / "0.jpg", quality=95)
    odd = tmp_path / "train" / "b"
    image.save(odd / "1.png")
    image.convert("CMYK").save(odd / "2.jpg")
    Image.new("RGB", (4097, 8), (9, 99, 199)).save(odd / "3.jpg")
    ordinary = tmp_path / "train" / "a"
    image.convert("L").save(ordinary / "1.jpg", quality=95)
    image.save(ordinary / "2.jpg", quality=95, progressive=True)
    return tmp_path


def difference(one: np.ndarray, other: torch.Tensor) -> np.ndarray:
    """Return the absolute differences of pixels, 0 to 255."""
    assert one.shape == tuple(other.shape) and other.dtype == torch.uint8
    return np.abs(one.astype(int) - other.cpu().numpy())


@pytest.mark.parametrize(("size", "mean", "maximum"), [(224, 0.3, 1), (64, 2, 40)])
def test_pixels_are_those_of_the_cpu_but_for_rounding(photographs, size, mean, maximum):
    """The CPU decodes a reduced image for 64 pixels per side, and the whole image, like `JpegDecoder`, for 224."""
    decode = JpegDecoder(size, CPU, tells=True)
    expected, given = open_both(photographs, image_size=size)
    for epoch in (0, 1):
        order = np.random.default_rng(epoch).permutation(16)
        (pixels, labels), (files, same) = (dataset.train.read(order, epoch=epoch) for dataset in (expected, given))
        assert {type(file) for file in files} == {EncodedImage} and (labels == same).all()
        found = difference(pixels, decode(files))
        assert found.mean() < mean and found.max() <= maximum
    pixels, files = (dataset.validation.read(np.arange(2), epoch=0)[0] for dataset in (expected, given))
    assert difference(pixels, decode(files)).max() <= 1


def test_an_image_is_the_same_in_every_batch(photographs):
    decode = JpegDecoder(32, CPU, tells=True)
    _, given = open_both(photographs, image_size=32)
    files, _ = given.train.read(np.arange(16), epoch=2)
    whole = decode(files)
    for part in (slice(3, 4), slice(5, 12)):
        assert torch.equal(decode(files[part]), whole[part])


def test_the_cpu_decodes_what_a_gpu_does_not(mixture, capsys):
    expected, given = open_both(mixture, image_size=16)
    decode = JpegDecoder(16, CPU, tells=True)
    pixels, _ = expected.train.read(np.arange(7), epoch=0)
    files, _ = given.train.read(np.arange(7), epoch=0)
    assert [isinstance(file, EncodedImage) for file in files] == 4 * [True] + 3 * [False]
    for _ in range(2):
        found = difference(pixels, decode(files))
        assert found[:4].max() <= 2 and found[4:].max() == 0
    said = capsys.readouterr().err
    assert said.count("the CPU decodes 3 of 7 images") == 1


def test_files_that_the_decoder_refuses_are_the_cpu_s(mixture, capsys):
    """torchvision does not report which of several files it could not decode."""
    damaged = mixture / "train" / "a" / "0.jpg"
    damaged.write_bytes(damaged.read_bytes().replace(b"\xff\xdb", b"\xff\xe1"))  # without a quantisation table
    whole = (mixture / "train" / "a" / "1.jpg").read_bytes()
    (mixture / "train" / "a" / "3.jpg").write_bytes(whole[: len(whole) // 2])
    expected, given = open_both(mixture, image_size=16, skip_unreadable=True)
    decode = JpegDecoder(16, CPU, tells=False)
    pixels, _ = expected.train.read(np.arange(4), epoch=0)
    assert difference(pixels, decode(given.train.read(np.arange(4), epoch=0)[0])).max() <= 2
    assert np.array_equal(given.train.unreadable_mask(), expected.train.unreadable_mask())
    assert expected.train.unreadable_mask().sum() == 2
    assert not capsys.readouterr().err  # only rank 0 warns

    _, given = open_both(mixture, image_size=16)
    files, _ = given.train.read(np.arange(2), epoch=0)
    assert {type(file) for file in files} == {EncodedImage}
    with pytest.raises(UserError, match="expected an image in .*/a/0.jpg, received what cannot be read"):
        decode(files)


def test_training_follows_the_same_curve(photographs):
    """Train with the worker, in slices and in passes."""
    common = {"device": "cpu", "epochs": 2, "base_lr": 0.001, "global_batch_size": 8}
    for flags in ({"slices": 2}, {"accumulate_steps": 2}):
        losses = []
        for dataset in open_both(photographs, image_size=16):
            torch.manual_seed(0)
            network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 10))
            history = Session(network, dataset, **common, **flags).fit()
            losses.append([epoch["train_loss"] for epoch in history] + [history[-1]["validation_loss"]])
        assert losses[0] == pytest.approx(losses[1], rel=0.02)
        assert losses[0] != losses[1]  # two decoders were used


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_pixels_on_a_device(photographs, tmp_path, device):
    """nvJPEG's pixels differ from libjpeg-turbo's by less than 2 on average, the bound in torchvision's tests."""
    visible = gpus.need() if device == "cuda" else {}
    output = tmp_path / "decoding.json"
    words = (output, "--data-dir", photographs, "--decode-threads", 2, "--batch-size", 5, "--device", device)
    result = launch("alone", 1, "-m", "allstep.benchmarks.gpu.decode", *map(str, words), **visible)
    assert result.returncode == 0, result.output
    assert 0 < read_json(Decoding, output).mean_difference < 2


@pytest.mark.gpu
def test_trains_on_a_gpu(photographs, tmp_path):
    words = ("--dataset", "image-folder", "--data-dir", photographs, "--image-size", "32", "--decode", "gpu")
    words = (*words, "--batch-size", "4", "--epochs", "2", "--output-dir", tmp_path)
    result = launch("alone", 1, "pytorch/train.py", *map(str, words), **gpus.need())
    assert result.returncode == 0, result.output
    assert last(events(tmp_path), "start")["device"] == "cuda"
